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
        "tasks/table_rows.py",
        "pairs = zip(hits, other, strict=True)",
        "True",
        "False",
    ): "both have one row per seed",
    (
        "tasks/tables.py",
        'marks.get(best[name].get(row.method, 2), "{}").format(show_interval(score, row.scores[name]))',
        "2",
        "3",
    ): "any number above 1 has no mark",
    (
        "tasks/tables.py",
        'marks.get(best[name].get(row.method, 2), "%s") % show_interval(score, row.scores[name], plus_minus=r"$\\pm$")',
        "2",
        "3",
    ): "any number above 1 has no mark",
    ("metrics/scores.py", "CHUNK_ROWS = 1024", "1024", "1025"): "how many rows are read at a time changes no score",
    (
        "posthoc/affine.py",
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
        "posthoc/fitting.py",
        "[rows.read(part).argmax(1).numpy() == train.labels[part] "
        "for part in np.array_split(some, min(len(some), 10))]",
        "10",
        "11",
    ): "in how many parts rows are read changes nothing",
    (
        "posthoc/tempered.py",
        "half = torch.from_numpy(0.5 * np.log(data.class_counts[present] / data.class_counts.sum()))",
        "data.class_counts[present] / data.class_counts.sum()",
        "data.class_counts[present] * data.class_counts.sum()",
    ): "a factor of all priors shifts all logits alike: no probability changes",
    (
        "posthoc/curvature.py",
        "for (step, change, curvature), part in zip(self._pairs, reversed(parts), strict=True):",
        "True",
        "False",
    ): "there is one part for each pair",
    (
        "posthoc/unseen.py",
        "for row in zip(*parts, strict=True):",
        "True",
        "False",
    ): "features are read for the same rows as logits",
    (
        "posthoc/selection.py",
        "return np.asarray(sum(share * known[one] for share, one in zip(shares, nearest, strict=True)))",
        "True",
        "False",
    ): "there is one share for each of them",
    (
        "posthoc/halo.py",
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
        "training/streams.py",
        "for transform, sampler in zip(self.transforms, self.samplers, strict=True)",
        "True",
        "False",
    ): "a stream has one transform and one sampler",
    (
        "posthoc/sgd.py",
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
        "posthoc/unseen.py",
        'found.append(hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=16).digest())',
        "16",
        "17",
    ): "a longer digest is equal for equal rows alone, too",
    (
        "posthoc/affine.py",
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
        "posthoc/candidates.py",
        "place = np.full(held_out.num_classes, -1)",
        "1",
        "2",
    ): "any negative number says that a class is absent",
    (
        "posthoc/tempered.py",
        "place = np.full(data.num_classes, -1)",
        "1",
        "2",
    ): "any negative number says that a class is absent",
    (
        "posthoc/halo.py",
        "place = np.full(train.num_classes, -1)",
        "1",
        "2",
    ): "no label is of a class that is absent",
    (
        "posthoc/cross_fit.py",
        "fold = np.full(len(labels), -1)",
        "1",
        "2",
    ): "any negative number says that a sample is in no fold",
    (
        "posthoc/halo.py",
        "place = np.full(train.num_classes, -1)",
        "-1",
        "1",
    ): "no label is of a class that is absent",
    (
        "posthoc/affine.py",
        "totals = torch.zeros(1 + (5 if blocks else 2) * classes, dtype=torch.float64)",
        "2",
        "3",
    ): "what is more than two numbers for each class is zeros that nobody reads",
}
