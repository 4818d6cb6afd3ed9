"""A taskset of verifiers: `groupwise train verifiers_sums.py --model …`."""

from collections.abc import Iterator

import verifiers.v1 as vf

import groupwise as gw


class Sum(vf.TaskData):
    total: int


class Adding(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content.strip() == str(self.data.total))


class Sums(vf.Taskset[Adding, vf.TasksetConfig]):
    def load(self) -> Iterator[Adding]:
        return (Adding(Sum(prompt=f"{n} + {n + 3}? Only the number.", total=2 * n + 3)) for n in range(200))


task = gw.verifiers_task(Sums(vf.TasksetConfig()))
