import pytest
import torch

from apportion.data.errors import UsageError
from apportion.modules.checkpoint import KEY, saved_state

WEIGHTS = {"policy.a": torch.zeros(2, 3), "policy.b": torch.zeros(4)}


def test_what_fits_is_given_back():
    assert saved_state({"state_dict": dict(WEIGHTS), KEY: {"rollout_step": 7}}, WEIGHTS) == {"rollout_step": 7}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"policy.a": torch.zeros(2, 3)}, r"policy.b is missing in the checkpoint and of shape \[4\]"),
        ({**WEIGHTS, "policy.c": torch.zeros(1)}, r"policy.c is of shape \[1\] in the checkpoint and missing"),
        ({**WEIGHTS, "policy.a": torch.zeros(3, 2)}, r"policy.a is of shape \[3, 2\] .* of shape \[2, 3\]"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(state, said):
    with pytest.raises(UsageError, match=said):
        saved_state({"state_dict": state, KEY: {}}, WEIGHTS)


@pytest.mark.parametrize("checkpoint", [{"state_dict": dict(WEIGHTS)}, {KEY: {}}, {}])
def test_what_no_fit_of_ours_wrote_is_refused(checkpoint):
    with pytest.raises(UsageError, match="not written by a fit of apportion"):
        saved_state(checkpoint, WEIGHTS)
