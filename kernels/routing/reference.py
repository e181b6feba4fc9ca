"""Routing in plain torch: what the fast ones must equal."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .protocol import Routing, Scoring


def route(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As `Operations.route`. All of it in float32."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(logits_TE.dtype).float() if routing.rounds else x

    def score(x: Tensor) -> Tensor:
        if routing.scoring is Scoring.SQRT_SOFTPLUS:
            return rounded(rounded(F.softplus(x)).sqrt())
        return rounded(torch.sigmoid(x) if routing.scoring is Scoring.SIGMOID else F.softmax(x, dim=-1))

    wide_TE = logits_TE.float()
    scores_TE = wide_TE if routing.is_of_chosen else score(wide_TE)
    choice_TE = scores_TE if routing.bias_E is None else scores_TE + routing.bias_E
    if routing.groups > 1:
        choice_TE = choice_TE.masked_fill(~_of_best_groups(choice_TE, routing), -torch.inf)
    experts_TK = _best(choice_TE, routing.most)
    shares_TK = scores_TE.gather(1, experts_TK)
    if routing.is_of_chosen:
        shares_TK = score(shares_TK)
    if routing.least is not None:
        shares_TK = rounded(shares_TK / rounded(rounded(shares_TK.sum(-1, keepdim=True)) + routing.least))
    shares_TK = rounded(shares_TK * routing.scale)
    if routing.scale_E is not None:
        shares_TK = shares_TK * routing.scale_E[experts_TK]
    return shares_TK.to(routing.dtype or logits_TE.dtype), experts_TK


def _of_best_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """Returns [T,E] bool."""
    choice_TGS = choice_TE.unflatten(1, (routing.groups, -1))
    worth_TG = choice_TGS.topk(2, dim=-1).values.sum(-1)
    is_best_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, _best(worth_TG, routing.most_groups), True)
    return is_best_TG.unsqueeze(-1).expand_as(choice_TGS).flatten(1)


def _best(choice: Tensor, count: int) -> Tensor:
    """Returns the places [T, count] of the best of each row."""
    return choice.sort(dim=1, descending=True, stable=True).indices[:, :count]
