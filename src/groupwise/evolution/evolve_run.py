"""The search loop: train, evaluate and select a population of adapters on one base model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from types import TracebackType

from groupwise.config import Config
from groupwise.errors import ConfigError, InvariantError, ServersGoneError
from groupwise.evaluate.held_out import Evaluation
from groupwise.evolution.evolve_state import (
    EvolutionLog,
    MemberRecord,
    SearchStart,
    stats_of,
    summary_of,
    table,
    write_elite,
    write_plots,
)
from groupwise.evolution.population import (
    AFTER,
    BEFORE,
    MemberEvaluator,
    Population,
    PopulationCollector,
    SharedBase,
    tokens_of,
)
from groupwise.evolution.search_space import SearchSpace
from groupwise.evolution.selection import Selector
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import prune, write_checkpoint
from groupwise.learner.learner import try_custom_loss
from groupwise.model.device import deterministic_kernels, device_of
from groupwise.model.load import load_reward_models
from groupwise.records import Example, Group
from groupwise.tasks import Task, UserFunctions, isolated, leave_task_file, load_task, use_functions
from groupwise.tasks.user_code import code_of
from groupwise.tracking.run_folder import EVOLUTION
from groupwise.tracking.terminal import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.base_run import check_single_turn
from groupwise.training.collector import Batch, check_failures, too_many_failed
from groupwise.training.loop import collect_batch
from groupwise.training.prompt_selection import PromptLimit
from groupwise.training.recorder import Recorder
from groupwise.training.resume import command_of, same_code, same_data, with_epochs
from groupwise.training.run_end import Interrupt, explain_full_disk
from groupwise.training.step_metrics import batch_metrics


class EvolveRun:
    """Trains, evaluates and selects a population. Used as a context manager, as a training run is."""

    def __init__(
        self, config: Config, *, task: Task, start: SearchStart, functions: UserFunctions | None = None
    ) -> None:
        self.config, self.task, self.folder = config, task, start.folder
        with ExitStack() as resources:
            resources.push(start.withdraw_after)
            resources.enter_context(start.lock)
            self.split = task.split(config.task, config.run.seed)
            self.space = SearchSpace.of(config, task)
            data = same_data(start.state.data, self.split.fingerprint)
            own = {} if functions is None else functions.code
            code = same_code(start.state.code, code_of(task) | own)
            self.state = replace(start.state, data=data, code=code, settings=asdict(config))
            title = f"{config.evolve.method} · {task.name} · {config.model.name}"
            self.recorder = Recorder(
                self.folder, title=title, total=config.run.max_steps, done=self.state.step
            )
            resources.callback(self.recorder.close)
            self.interrupt = resources.enter_context(Interrupt(self.recorder.display.message))
            device = device_of(config.model.device)
            resources.enter_context(deterministic_kernels(device, on=config.run.deterministic))
            self.base = SharedBase(config, functions)
            load_reward_models(task.rewards, self.base.policy.device)
            limit = PromptLimit(config, task=task, policy=self.base.policy)
            self.split, too_long = limit.leave_out(self.split)
            self.population = Population(config, task=task, split=self.split, base=self.base)
            self.collector = PopulationCollector(self.population)
            self.evaluator = MemberEvaluator(
                config, task=task, split=self.split, base=self.base, folder=self.folder
            )
            if not self.evaluator.choosing and self.selects:
                raise ConfigError(
                    "selection needs held-out examples: set task.held_out and do not skip evaluation"
                )
            self.selector = Selector(config, space=self.space, population=self.population)
            self._populate(start.checkpoint)
            self.recorder.begin(config, done=self.state.step)
            self.recorder.expect(task.rewards, self.split.train)
            self.base.policy.save_tokenizer(self.folder.tokenizer)
            if start.starts_again:
                self.recorder.say("the search was stopped before its first checkpoint; starting again")
            if too_long:
                self.recorder.say(limit.notice(too_long))
            for notice in (*config.notices(), *self._notices()):
                self.recorder.say(notice)
            self.resources = resources.pop_all()
        self.rewards: dict[int, float] = {}
        self.before: Evaluation | None = self.evaluator.recall(BEFORE) if self.state.step else None
        self.clock = time.monotonic()

    @property
    def selects(self) -> bool:
        """Whether members are compared; a single member is not."""
        return self.config.evolve.population > 1

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps; stop early on Ctrl-C."""
        if self.state.step == 0:
            self.before = self.evaluator.evaluate(BEFORE, slot=0, step=0)  # all members still equal the base
            self._show_evaluation("before", self.before)
        if self._has_steps_left() and self.state.unselected:
            self.state = replace(self.selector.select(self.state), unselected=False)
        while self._has_steps_left() and not self.interrupt.requested:
            yield self.state.step + 1

    def collect(self, step: int) -> Mapping[int, Batch]:
        """Sample prompts, generate rollouts, score them and compute advantages, for all members at once."""
        result = collect_batch(self.collector, step, cursor=self.state.cursor, rates=self.state.rates)
        tokens = sum(tokens_of(batch.all_groups) for batch in result.members.values())
        self.state = replace(
            self.state, cursor=result.cursor, rates=result.rates, tokens=self.state.tokens + tokens, step=step
        )
        for slot, reason in result.diverged.items():
            self._diverged(slot, reason)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.rollouts(step, self._groups_by_member(result.members))
        return result.members

    def _groups_by_member(self, batches: Mapping[int, Batch]) -> list[Group]:
        """Return the groups of all members, each example with the name of the member that answered it."""
        return [
            replace(group, example=Example({**group.example, "population_member": self.state.at(slot).name}))
            for slot, batch in batches.items()
            for group in batch.all_groups
        ]

    def learn(self, step: int, batches: Mapping[int, Batch]) -> dict[int, dict[str, float]]:
        """Update one member after the other; return the metrics of each update, by slot."""
        if self.base.policy.device.type == "cuda":
            self.base.engine.release()  # free memory for the updates
        limit = self.config.task.max_failed
        if all(too_many_failed(batch.all_groups, limit=limit) for batch in batches.values()):
            for batch in batches.values():  # the rewards fail, not the members
                check_failures(batch, limit=limit)
        reports: dict[int, dict[str, float]] = {}
        for slot, batch in batches.items():
            try:
                report = self.population.learn(slot, batch, step=step)
            except ServersGoneError:
                raise  # the teacher is gone; the member did not diverge
            except InvariantError as error:
                self._diverged(slot, str(error))
                continue
            sampled = batch_metrics(
                batch,
                truncated=self.config.rollout.sampling.truncates or self.base.policy.has_sampling_rules,
                shown_reward=self.population.collectors[slot].shown_reward,
            )
            reports[slot] = {**sampled, **report}
        return reports

    def track(self, step: int, reports: Mapping[int, Mapping[str, float]]) -> None:
        """Log the step; evaluate, select and save when they are due."""
        self.rewards = {
            slot: report["reward/mean"] for slot, report in reports.items() if "reward/mean" in report
        }
        metrics = self._metrics(reports)
        every = self.config.evolve.every
        reached = self._tokens_used_up(metrics.get("rollout/length", 0.0))
        last = step == self.config.run.max_steps or reached
        selecting = self.selects and (step % every == 0 or last)
        interval = self.config.evaluate.every
        measuring = selecting or (self.selects and interval > 0 and step % interval == 0)
        if measuring:
            metrics |= self._measure()
        if selecting:
            self._save_elite()
            target, best = self.config.evolve.target, self.state.best
            reached |= target is not None and best is not None and fmean(best.scores) >= target
            last = last or reached
            if not last:
                self.state = self.selector.select(self.state)
        unselected = selecting and last and step % every == 0
        self.state = replace(self.state, reached=reached, unselected=unselected)
        self.recorder.step(step, metrics)
        self.recorder.display.note(table(self.state, self.rewards), new=measuring)
        if last or selecting or step % self.config.run.save_every == 0 or self.interrupt.requested:
            self._save()

    def _has_steps_left(self) -> bool:
        return not self.state.reached and self.state.step < self.config.run.max_steps

    def _tokens_used_up(self, length: float) -> bool:
        """Whether the token budget is used up, with a reserve for the last evaluation."""
        evolve, evaluate = self.config.evolve, self.config.evaluate
        prompts = len(self.evaluator.choosing) * len(self.population.members) if self.selects else 0
        reserve = prompts * evaluate.samples * length
        return evolve.tokens is not None and self.state.tokens + reserve >= evolve.tokens

    def _populate(self, checkpoint: Path | None) -> None:
        """Create all members: from the checkpoint, or fresh."""
        if checkpoint is not None:
            self.base.members.weights += [None] * (self.config.evolve.population - len(self.base.members))
            for record in self.state.people:
                if record.trouble is None:
                    self.population.put(record.place, record.values)
            self.population.load(checkpoint)
            return
        start, size = self.space.start(self.config, self.task), self.config.evolve.population
        others = self.space.spread(size - 1, seed=self.config.run.seed)
        for slot in range(size):
            values = others[slot - 1] if slot and self.config.evolve.spread else dict(start)
            self.population.put(slot, values)
            born = MemberRecord(name=slot, place=slot, parent=None, born=0, values=values)
            self.state = replace(self.state, names=slot + 1, people=(*self.state.people, born))
            self.state = self.state.with_event(slot, "born", "from the base")

    def _measure(self) -> dict[str, float]:
        """Evaluate all members on the same prompts with the same seeds."""
        scores, diverged, tokens = self.collector.measure(
            self.evaluator.choosing, samples=self.config.evaluate.samples
        )
        self.state = replace(self.state, tokens=self.state.tokens + tokens)
        for slot, reason in diverged.items():
            self._diverged(slot, reason)
        for slot, result in scores.items():
            record = replace(self.state.at(slot), scores=result, measured=self.state.step)
            self.state = self.state.with_member(record)
        self.state = self.state.snapshot()
        best = self.state.best
        assert best is not None, "a member is left, or `_diverged` would have raised"
        metrics = {f"member/{slot}/accuracy": fmean(result) for slot, result in scores.items()}
        return {
            **metrics,
            "population/best_accuracy": fmean(best.scores),
            "population/mean_accuracy": fmean(metrics.values()),
        }

    def _diverged(self, slot: int, reason: str) -> None:
        """Remove a diverged member; the others continue."""
        record = self.state.at(slot)
        self.population.drop(slot)
        self.state = self.state.with_member(replace(record, trouble=f"diverged: {reason}", scores=()))
        self.state = self.state.with_event(record.name, "diverged", reason)
        self.recorder.warn(
            f"member {record.name} diverged and is excluded until the next selection: {reason}"
        )
        if not self.population.members:
            raise InvariantError(f"every member diverged; last reason: {reason}; try lower learning rates")

    def _metrics(self, reports: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Return means over the population under a run's metric names, and the metrics of each member."""
        names = dict.fromkeys(name for report in reports.values() for name in report)
        metrics = {name: fmean(r[name] for r in reports.values() if name in r) for name in names}
        metrics["population/tokens"] = float(self.state.tokens)
        metrics["population/size"] = float(len(self.population.members))
        for slot, report in reports.items():
            for name in ("reward/mean", "policy/loss", "policy/kl", "rollout/length"):
                if name in report:
                    metrics[f"member/{slot}/{name}"] = report[name]
            for name, value in self.state.at(slot).values.items():
                metrics[f"member/{slot}/{name}"] = value
        if self.rewards:
            metrics["population/best_reward"] = max(self.rewards.values())
        return metrics

    def _notices(self) -> Iterator[str]:
        bounds = ", ".join(f"{name} {low:g} … {high:g}" for name, (low, high) in self.space.bounds.items())
        yield f"{len(self.population.members)} members share one base model and vary {bounds}"
        if not self.base.engine.batched:
            yield "members generate one after the other: these layers or adapters cannot be batched"
        yield from self.base.policy.notices()
        yield from self.evaluator.notices()

    def _save_elite(self) -> MemberRecord | None:
        """Save the best member, or the only one, before selection can change it."""
        best = self.state.best or next((p for p in self.state.people if p.trouble is None), None)
        if best is not None:
            write_elite(self.folder, self.population.members[best.place], self.config)
        return best

    def _show_evaluation(self, when: str, result: Evaluation | None) -> None:
        if result is not None:
            self.recorder.evaluation(when, result)

    def _save(self) -> None:
        now = time.monotonic()
        self.state = replace(self.state, seconds=self.state.seconds + now - self.clock)
        self.clock = now
        self.recorder.flush()
        self._write_log({})
        state = {name: value for name, value in self.state.to_json().items() if name != "step"}
        write_checkpoint(
            self.folder.checkpoints, step=self.state.step, write=self.population.save, state=state
        )
        self._prune()

    def _prune(self) -> None:
        prune(self.folder.checkpoints, keep_last=self.config.run.keep_last, best=None)

    def _write_log(self, judged: Mapping[str, float]) -> None:
        evolve = {"method": self.config.evolve.method, "bounds": dict(self.space.bounds)}
        log = EvolutionLog(state=self.state, settings=evolve, judged=judged)
        write_atomically(self.folder.path / EVOLUTION, json.dumps(log.to_json(), indent=1))

    def __enter__(self) -> EvolveRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.recorder.fail(error, kind="evolve")
            self.resources.__exit__(kind, error, trace)
            return
        with self.resources:
            self._prune()  # a session killed after its last checkpoint left one too many
            after: Evaluation | None = None
            best = self._save_elite()
            if not self._has_steps_left() and best is not None:
                after = self.evaluator.evaluate(AFTER, slot=best.place, step=self.state.step)
                self._show_evaluation("after", after)
            self._write_log(after.metrics() if after else {})
            write_plots(self.folder, self.state)
            summary = summary_of(self.config, self.state, folder=self.folder, before=self.before, after=after)
            self.recorder.end(summary, stats_of(self.state, before=self.before, after=after))


def evolve(
    config: Config,
    *,
    resume: Path | None = None,
    task: Task | None = None,
    functions: UserFunctions | None = None,
) -> Path:
    """Run a search and return its folder. `resume` continues exactly from the last checkpoint."""
    if task is not None:
        leave_task_file(task)
    if config.run.kind != "evolve":
        raise ConfigError(f"these settings are for another command: groupwise {command_of(config)}")
    if resume is None:
        config.algo.check_combination()
    config = config.resolve()
    task = task or load_task(config.task)
    config = with_epochs(config, task)
    check_supported(config, task)
    functions = functions or use_functions(config)
    try_custom_loss(config.algo)
    tracker_names(config.track)
    start = SearchStart.new(config, task=task.name) if resume is None else SearchStart.resumed(resume, config)
    if done := start.already_done(config):
        start.lock.close()
        open_display().message(done)
        return start.folder.path

    with (
        isolated(task, workers=config.task.reward_workers) as task,
        explain_full_disk(start.folder, config),
        EvolveRun(config, task=task, start=start, functions=functions) as search,
    ):
        for step in search.steps():
            batches = search.collect(step)  # prompts, rollouts, rewards, advantages: all members at once
            reports = search.learn(step, batches)  # loss, update: one adapter at a time
            search.track(step, reports)  # log, evaluate, select, checkpoint
    return search.folder.path


def check_supported(config: Config, task: Task) -> None:
    if not config.lora.r:
        raise ConfigError("members of a population are adapters: set lora.r, for example lora.r=16")
    if config.lora.init is not None:
        raise ConfigError(
            "a population starts with new adapters: merge the adapter first (groupwise merge --lora-model "
            f"{config.lora.init} --output-path FOLDER) and use that folder as the model"
        )
    check_single_turn(config, multi_turn=task.is_multi_turn)
    if config.run.callbacks:
        raise ConfigError("run.callbacks requires groupwise train; populations have no callbacks")
    if config.engine.kind != "own":
        raise ConfigError("a population requires groupwise's own engine: set engine.kind=own")
    if config.engine.fp8:
        raise ConfigError(f"populations do not generate in FP8; leave out {' and '.join(config.engine.fp8)}")
