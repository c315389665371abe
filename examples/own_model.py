"""Calibrate your own model: one call, no retraining, a model of the same class back.

The head has a name of its own and is found all the same: it is the layer whose output the model
returns. Only that layer differs in the calibrated model, so it costs nothing at inference.

    python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail

data = longtail.data.open_splits("digits-lt")
loader = DataLoader(TensorDataset(data.train.pixels / 255, data.train.labels), batch_size=64, shuffle=True)


class MyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.which_digit = nn.Linear(64, 10)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 64), nn.ReLU()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.which_digit(self.layers(images))


torch.manual_seed(0)
model = MyNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(12):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

calibrated, marc = longtail.calibrate(model, loader)

for title, network in (("before", model), ("after", calibrated)):
    with torch.inference_mode():
        logits = network.eval()(data.test.pixels / 255)
    scores = longtail.evaluate(logits, data.test.labels, data.train.class_counts)
    print(f"{title}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")
head = type(calibrated.which_digit).__name__
print(f"{type(calibrated).__name__} with {head} head, {marc.n_parameters_} numbers learnt")
