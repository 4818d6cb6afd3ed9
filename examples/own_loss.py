"""A loss of your own: REINFORCE on the tokens that the policy was least sure of."""

import torch

import groupwise as gw


def surprise(tokens: gw.Tokens, settings: gw.LossSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weight = 1 - tokens.old_N.exp()  # near 0 for tokens that were certain
    loss = -weight * tokens.advantages_N * tokens.logprobs_N
    return loss, {"policy/surprise": weight.sum()}


if __name__ == "__main__":
    gw.train("countdown", loss=surprise, max_steps=36)
