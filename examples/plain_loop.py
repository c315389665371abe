"""A loss of longtail in a plain training loop: cross-entropy beside Balanced Softmax on long-tailed digits.

A loss takes the class counts once and is then called as any other: `loss(logits, labels)`.

    python examples/plain_loop.py
"""

import torch
from torch import nn

import longtail

data = longtail.data.open_splits("digits-lt")  # 103 images of the 0 down to 2 of the 9
images, labels = data.train.pixels / 255, data.train.labels


def train(loss: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        for rows in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            loss(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


for loss in (nn.CrossEntropyLoss(), longtail.losses.BalancedSoftmax(data.train.class_counts)):
    model = train(loss)
    with torch.inference_mode():
        logits = model(data.test.pixels / 255)
    scores = longtail.evaluate(logits, data.test.labels, data.train.class_counts)
    print(f"{type(loss).__name__}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")
