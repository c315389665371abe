"""Mutants that compute the same as the source, by hand: (file, line of source, before, after) → why.

They are counted apart, never left out.
"""

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "metrics/intervals.py",
        "value = np.where(sizes > 0, total / sizes, np.nan)",
        "sizes > 0",
        "sizes >= 0",
    ): "0 / 0 is NaN already",
    (
        "metrics/intervals.py",
        "half = ndtri(0.5 + CONFIDENCE / 2) * np.sqrt(np.maximum(squares + 1 - total * centre, 0)) / (sizes + 2)",
        "0",
        "1",
    ): "the number is at least 1, because total² is at most n times squares",
    (
        "metrics/intervals.py",
        "half = float(stdtrit(max(freedom, 1.0), 0.5 + CONFIDENCE / 2)) * float(np.sqrt(variance))",
        "1.0",
        "2.0",
    ): "three seeds or more, and n + 2 images of a class, leave at least 2 degrees of freedom",
    (
        "metrics/intervals.py",
        "found = np.flatnonzero(change.high < 0).tolist()",
        "change.high < 0",
        "change.high <= 0",
    ): "a bound is a whole number of images plus an irrational multiple of a root: it is never exactly 0",
    (
        "metrics/state.py",
        "return ((2 * last - counts + 1) / 2)[codes]",
        "(2 * last - counts + 1) / 2",
        "(2 * last - counts + 1) * 2",
    ): "a factor of all ranks changes no correlation",
    (
        "metrics/state.py",
        "return ((2 * last - counts + 1) / 2)[codes]",
        "1",
        "2",
    ): "a shift of all ranks changes no correlation",
    (
        "metrics/state.py",
        "return round(float(np.corrcoef(_ranks(first), _ranks(second))[0, 1]), 12)",
        "12",
        "13",
    ): "the digits after the twelfth are rounding error",
    (
        "tasks/rows.py",
        "pairs = zip(hits, other, strict=True)",
        "True",
        "False",
    ): "both have one row per seed",
    ("metrics/scores.py", "CHUNK_ROWS = 1024", "1024", "1025"): "how many rows are read at a time changes no score",
    (
        "posthoc/solver/affine.py",
        "return value, gradient, Blocks(aa, 0 * cross, 0 * bb + 1, np.sqrt(bb) / self.norms.numpy())",
        "0 * bb",
        "0 / bb",
    ): "0 by a positive number is 0 too",
    (
        "losses/class_balanced.py",
        "return sum_to_classes(-1 / ((log_power / 2).tanh() * (log_power.exp() + 1)))",
        "-1",
        "1",
    ): "weights are rescaled to sum to K: a common factor falls out",
    (
        "losses/class_balanced.py",
        "return sum_to_classes(-1 / ((log_power / 2).tanh() * (log_power.exp() + 1)))",
        "1",
        "2",
    ): "weights are rescaled to sum to K: a common factor falls out",
    (
        "posthoc/scaling.py",
        "value, gradient = self.affine.value_and_gradient(np.repeat([x[0], 0.0], self.classes))",
        "0.0",
        "1.0",
    ): "the same shift of every class changes no probability, and there is no ridge",
    (
        "posthoc/inputs.py",
        "rows, chunks = train.rows(), np.array_split(subsample, min(len(subsample), 10))",
        "10",
        "11",
    ): "in how many chunks rows are read changes nothing",
    (
        "posthoc/tempered.py",
        "half = torch.from_numpy(0.5 * np.log(data.class_counts[present] / data.class_counts.sum()))",
        "data.class_counts[present] / data.class_counts.sum()",
        "data.class_counts[present] * data.class_counts.sum()",
    ): "a factor of all priors shifts all logits alike: no probability changes",
    (
        "posthoc/solver/curvature.py",
        "for (step, change, curvature), factor in zip(self._pairs, reversed(factors), strict=True):",
        "True",
        "False",
    ): "there is one factor for each pair",
    (
        "posthoc/held_out.py",
        "rows = zip(*(np.ascontiguousarray(array.numpy()) for array in arrays), strict=True)",
        "True",
        "False",
    ): "features are read for the same rows as logits",
    (
        "posthoc/settings.py",
        "return np.asarray(sum(share * solutions[one] for share, one in zip(shares, nearest, strict=True)))",
        "True",
        "False",
    ): "there is one share for each of them",
    (
        "posthoc/halo/__init__.py",
        "self.numbers_ = dict(zip(problem.names, solution.x.tolist(), strict=True))",
        "True",
        "False",
    ): "a problem has one number for each name",
    (
        "posthoc/marc.py",
        "return _Known(problem, dict(zip(gammas, largest.tolist(), strict=True)))",
        "True",
        "False",
    ): "there is one gradient for each gamma",
    (
        "metrics/intervals.py",
        "for own, average in zip(weights, everything, strict=True)",
        "True",
        "False",
    ): "there is one average for each row of weights",
    (
        "training/setup.py",
        "for transform, sampler in zip(self.transforms, self.samplers, strict=True)",
        "True",
        "False",
    ): "a stream has one transform and one sampler",
    (
        "posthoc/solver/sgd.py",
        "return highest * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2",
        "1",
        "2",
    ): "where steps - warmup is at most 1, step - warmup is 0",
    (
        "training/plan.py",
        "share = (done - self.warmup) / max(last - first - self.warmup, 1)",
        "1",
        "2",
    ): "where the length after the warm-up is at most 1, done - warmup is 0",
    (
        "posthoc/held_out.py",
        'digests += [hashlib.blake2b(b"".join(values.tobytes() for values in row), digest_size=16).digest() '
        "for row in rows]",
        "16",
        "17",
    ): "a longer digest is equal for equal rows alone, too",
    (
        "posthoc/solver/affine.py",
        "weights * torch.where(kept > 0, whole / kept, 1.0)[own],",
        "1.0",
        "2.0",
    ): "it is the factor of weights that are 0",
    (
        "posthoc/base.py",
        "named = np.empty((0, data.num_classes)) if isinstance(logits, Outputs) else logits",
        "0",
        "1",
    ): "only the number of columns is looked at",
    (
        "posthoc/auto.py",
        "columns = np.full(held_out.num_classes, -1)",
        "1",
        "2",
    ): "any negative number says that a class is absent",
    (
        "posthoc/tempered.py",
        "columns = np.full(data.num_classes, -1)",
        "1",
        "2",
    ): "any negative number says that a class is absent",
    (
        "posthoc/halo/unseen.py",
        "fold = np.full(len(labels), -1)",
        "1",
        "2",
    ): "any negative number says that a sample is in no fold",
    (
        "posthoc/solver/affine.py",
        "totals = torch.zeros(1 + (5 if blocks else 2) * classes, dtype=torch.float64)",
        "2",
        "3",
    ): "what is more than two numbers for each class is zeros that nobody reads",
}
