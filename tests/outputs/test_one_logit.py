"""Models with one logit per sample, that of class 1 against class 0."""

import numpy as np
import pytest
import torch
from torch import nn

import longtail
from longtail.errors import UserError


class OneLogit(nn.Module):
    """The logit of class 1, as (N,), (N, 1) or its sigmoid."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc, self.form = nn.Linear(4, 6), nn.Linear(6, 1), form

    def forward(self, x):
        logit = self.fc(self.body(x).relu())
        return {"(N, 1)": logit, "(N,)": logit[:, 0], "sigmoid": logit.sigmoid().squeeze(1)}[self.form]


@pytest.mark.parametrize("form", ["(N, 1)", "(N,)", "sigmoid"])
@pytest.mark.parametrize("method", [longtail.MARC(), longtail.posthoc.LogitAdjustment(), longtail.posthoc.CRT()])
def test_a_model_with_one_logit_is_calibrated(form, method):
    """The new model has one logit again: that of the method for (-z / 2, z / 2)."""
    y = (torch.arange(400) % 8 == 0).float()
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) + 0.5 * y[:, None]
    model, loader = OneLogit(form), [(x[:200], y[:200]), (x[200:], y[200:, None])]
    outputs = longtail.extract(model, loader, progress=False)
    logit = model.fc(model.body(x).relu()).detach().numpy()
    np.testing.assert_allclose(outputs.logits, np.hstack([-logit / 2, logit / 2]), atol=1e-5)
    np.testing.assert_allclose(outputs.features @ outputs.head_weight.T + outputs.head_bias, outputs.logits, atol=1e-5)
    calibrated, fitted = longtail.calibrate(model, loader, method, progress=False)
    assert calibrated.fc.weight.shape == (1, 6)
    new = fitted.transform(outputs.logits, outputs.features)
    expected = torch.from_numpy(new[:, 1] - new[:, 0]).float().reshape(model(x).shape)
    got = calibrated(x).detach()
    torch.testing.assert_close(got, expected.sigmoid() if form == "sigmoid" else expected, rtol=1e-3, atol=1e-4)
    if form != "sigmoid" and not method.needs_features:
        torch.testing.assert_close(longtail.attach(model, fitted)(x).detach(), expected, rtol=1e-3, atol=1e-4)


def test_a_head_that_is_not_linear_does_not_fold_into_one_logit():
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    held_out = [(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), y)]
    with pytest.raises(UserError, match="a SigmoidHead does not fold into a layer with one logit; .*attach"):
        longtail.calibrate(
            OneLogit("(N,)"), [(x, y)], longtail.posthoc.PlattScaling(), validation=held_out, progress=False
        )
