"""find_head: shown by a batch, or guessed by names, and it says which."""

import pytest
import torch
from torch import nn

from longtail.errors import UserError
from longtail.outputs.extract import find_head


class Adapted(nn.Linear):
    """As an adapter library makes it: the layer, and two small ones beside it."""

    def __init__(self):
        super().__init__(8, 3)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})

    def forward(self, x):
        return super().forward(x) + self.lora_B["default"](self.lora_A["default"](x))


class WithAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.top = Adapted()

    def forward(self, x):
        return self.top(self.body(x))


class Unusual(nn.Module):
    """A head called as nobody's is, registered before the rest."""

    def __init__(self):
        super().__init__()
        self.decide = nn.Linear(8, 3)
        self.body = nn.Linear(4, 8)

    def forward(self, x):
        return self.decide(self.body(x).relu())


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.head_dist = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return (self.head(x) + self.head_dist(x)) / 2


class Dense(nn.Module):
    """As ModernBERT: what is called head comes before the classifier."""

    def __init__(self, classes):
        super().__init__()
        self.head = nn.ModuleDict({"dense": nn.Linear(4, 4)})
        self.classifier = nn.Linear(4, classes)

    def forward(self, x):
        return self.classifier(self.head["dense"](x).relu())


BATCH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])


def roberta():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.RobertaConfig(**small, vocab_size=50, max_position_embeddings=20, num_labels=16)
    return transformers.RobertaForSequenceClassification(config)


def test_a_name_alone_is_a_guess_and_says_so():
    guessed = find_head(Unusual())
    assert (guessed, guessed.sure) == ("body", False)
    assert "last linear layer" in guessed.found_by


def test_a_batch_shows_the_layer():
    model = Unusual().train()
    found = find_head(model, batch=BATCH, device="cpu")
    assert (found, found.sure, found.found_by) == ("decide", True, "a batch")
    assert model.training
    assert isinstance(model.get_submodule(found), nn.Linear)


def test_every_layer_of_several_is_named():
    assert find_head(Distilled(), batch=BATCH, device="cpu").layers == ("head", "head_dist")


def test_adapters_are_not_taken_for_the_head():
    assert find_head(WithAdapter()) == "top"
    with pytest.raises(UserError, match=r"no head to fold into: top \(Adapted\) does not compute weight times input"):
        find_head(WithAdapter(), batch=BATCH, device="cpu")


def test_as_many_features_as_classes_do_not_mislead():
    """`classifier.dense` gives as many numbers as there are classes, too."""
    assert find_head(roberta()) == "classifier.out_proj"


@pytest.mark.parametrize("classes", [3, 4])
def test_a_layer_called_head_before_the_classifier(classes):
    assert find_head(Dense(classes)) == "classifier"
    assert find_head(Dense(classes), batch=BATCH, device="cpu") == "classifier"


def test_a_wrong_name_is_refused_by_a_batch():
    with pytest.raises(UserError, match="does not depend on the output of 'body' alone"):
        find_head(Unusual(), "body", batch=BATCH, device="cpu")
    assert find_head(Unusual(), "decide", batch=BATCH, device="cpu") == "decide"
