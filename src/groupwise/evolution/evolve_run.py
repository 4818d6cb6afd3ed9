"""A search from its opening to its last word: what a step of a population does."""

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
from groupwise.errors import ConfigError, InvariantError
from groupwise.evaluate.held_out import Evaluation
from groupwise.evolution.evolve_state import EvolutionLog, MemberRecord, SearchStart
from groupwise.evolution.evolve_summary import stats_of, summary_of, table, write_elite, write_plots
from groupwise.evolution.member_rollouts import AFTER, BEFORE, MemberEvaluator, MemberRollouts, tokens_of
from groupwise.evolution.population import Population, SharedBase
from groupwise.evolution.search_space import SearchSpace
from groupwise.evolution.selection import Selector
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import prune, write_checkpoint
from groupwise.tasks import Task, isolated, leave_task_file, load_task
from groupwise.tasks.code_fingerprint import code_of
from groupwise.tracking.terminal import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.collector import Batch
from groupwise.training.interrupt import Interrupt, explain_full_disk
from groupwise.training.prompt_lengths import PromptLimit
from groupwise.training.recorder import Recorder
from groupwise.training.resume import command_of, same_code, same_data
from groupwise.training.step_metrics import batch_metrics

EVOLUTION = "evolution.json"


class EvolveRun:
    """A population that trains, is measured and selected. Used as a context, as a run is."""

    def __init__(self, config: Config, *, task: Task, opening: SearchStart) -> None:
        self.config, self.task, self.folder = config, task, opening.folder
        with ExitStack() as resources:
            resources.callback(opening.withdraw)
            resources.enter_context(opening.lock)
            self.split = task.split(config.task, config.run.seed)
            self.space = SearchSpace.of(config, task)
            data = same_data(opening.story.data, self.split.fingerprint)
            code = same_code(opening.story.code, code_of(task))
            self.story = replace(opening.story, data=data, code=code, settings=asdict(config))
            title = f"{config.evolve.method} · {task.name} · {config.model.name}"
            self.recorder = Recorder(
                self.folder, title=title, total=config.run.max_steps, done=self.story.step
            )
            resources.callback(self.recorder.close)
            self.interrupt = resources.enter_context(Interrupt(self.recorder.display.message))
            self.base = SharedBase(config)
            limit = PromptLimit(config, task=task, policy=self.base.policy)
            self.split, too_long = limit.leave_out(self.split)
            self.people = Population(config, task=task, split=self.split, base=self.base)
            self.answers = MemberRollouts(
                config, split=self.split, policy=self.base.policy, engine=self.base.engine
            )
            self.judge = MemberEvaluator(
                config, task=task, split=self.split, base=self.base, folder=self.folder
            )
            if not self.judge.choosing and self.selects:
                raise ConfigError(
                    "selection needs held-out examples: set task.held_out and leave evaluation on"
                )
            self.turnover = Selector(config, space=self.space, people=self.people)
            self._populate(opening.checkpoint)
            self.recorder.begin(config, done=self.story.step)
            self.base.policy.save_tokenizer(self.folder.tokenizer)
            if opening.begins_again:
                self.recorder.say("the search was stopped before its first checkpoint: it begins again")
            if too_long:
                self.recorder.say(limit.notice(too_long))
            for notice in (*config.notices(), *self._notices()):
                self.recorder.say(notice)
            self.resources = resources.pop_all()
        self.rewards: dict[int, float] = {}
        self.before: Evaluation | None = self.judge.recall(BEFORE) if self.story.step else None
        self.clock = time.monotonic()

    @property
    def selects(self) -> bool:
        """Whether members are compared: one alone is not."""
        return self.config.evolve.population > 1

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left; stops early on Ctrl-C."""
        if self.story.step == 0:
            self.before = self.judge.judge(BEFORE, place=0, step=0)  # everyone is the base still
            self._show("before", self.before)
        if self._more() and self.story.unselected:
            self.story = replace(self.turnover.select(self.story), unselected=False)
        while self._more() and not self.interrupt.asked:
            yield self.story.step + 1

    def collect(self, step: int) -> Mapping[int, Batch]:
        """Everyone's answers to the same prompts, in one batch."""
        found = self.answers.collect(step, self.people.collectors, cursor=self.story.cursor)
        tokens = sum(tokens_of(batch.drawn) for batch in found.batches.values())
        self.story = replace(self.story, cursor=found.cursor, tokens=self.story.tokens + tokens, step=step)
        for place, trouble in found.broken.items():
            self._diverged(place, trouble)
        return found.batches

    def learn(self, step: int, batches: Mapping[int, Batch]) -> dict[int, dict[str, float]]:
        """Update one member after the other; returns what each update says of itself, by place."""
        if self.base.policy.device.type == "cuda":
            self.base.engine.release()  # the updates need the memory
        reports: dict[int, dict[str, float]] = {}
        for place, batch in batches.items():
            try:
                report = self.people.learn(place, batch, step=step)
            except InvariantError as error:
                self._diverged(place, str(error))
                continue
            drawn = batch_metrics(
                batch,
                truncated=self.config.rollout.sampling.truncates,
                shown_reward=self.people.collectors[place].shown_reward,
            )
            reports[place] = {**drawn, **report}
        return reports

    def track(self, step: int, reports: Mapping[int, Mapping[str, float]]) -> None:
        """Log the step; measure, select and save when it is time to."""
        self.rewards = {
            place: report["reward/mean"] for place, report in reports.items() if "reward/mean" in report
        }
        metrics = self._metrics(reports)
        every = self.config.evolve.every
        reached = self._spent(metrics.get("rollout/length", 0.0))
        last = step == self.config.run.max_steps or reached
        selecting = self.selects and (step % every == 0 or last)
        interval = self.config.evaluate.every
        measuring = selecting or (self.selects and interval > 0 and step % interval == 0)
        if measuring:
            metrics |= self._measure()
        if selecting:
            self._save_elite()
            target, best = self.config.evolve.target, self.story.best
            reached |= target is not None and best is not None and fmean(best.scores) >= target
            last = last or reached
            if not last:
                self.story = self.turnover.select(self.story)
        unselected = selecting and last and step % every == 0
        self.story = replace(self.story, reached=reached, unselected=unselected)
        self.recorder.step(step, metrics)
        self.recorder.display.note(table(self.story, self.rewards), new=measuring)
        if last or selecting or step % self.config.run.save_every == 0 or self.interrupt.asked:
            self._save()

    def _more(self) -> bool:
        return not self.story.reached and self.story.step < self.config.run.max_steps

    def _spent(self, length: float) -> bool:
        """Whether the tokens are used up, but for those that the last measurement will take."""
        evolve, evaluate = self.config.evolve, self.config.evaluate
        prompts = len(self.judge.choosing) * len(self.people.members) if self.selects else 0
        reserve = prompts * evaluate.samples * length
        return evolve.tokens is not None and self.story.tokens + reserve >= evolve.tokens

    def _populate(self, checkpoint: Path | None) -> None:
        """Put everyone in their place: as they were at the checkpoint, or new."""
        if checkpoint is not None:
            self.base.members.weights += [None] * (self.config.evolve.population - len(self.base.members))
            for person in self.story.people:
                if person.trouble is None:
                    self.people.place(person.place, person.values)
            self.people.load(checkpoint)
            return
        start, size = self.space.start(self.config, self.task), self.config.evolve.population
        others = self.space.spread(size - 1, seed=self.config.run.seed)
        for place in range(size):
            values = others[place - 1] if place and self.config.evolve.spread else dict(start)
            self.people.place(place, values)
            born = MemberRecord(name=place, place=place, parent=None, born=0, values=values)
            self.story = replace(self.story, names=place + 1, people=(*self.story.people, born))
            self.story = self.story.told(place, "born", "from the base")

    def _measure(self) -> dict[str, float]:
        """Measure everyone on the same prompts with the same noise."""
        scores, broken, tokens = self.answers.measure(
            self.people.tasks, self.judge.choosing, samples=self.config.evaluate.samples
        )
        self.story = replace(self.story, tokens=self.story.tokens + tokens)
        for place, trouble in broken.items():
            self._diverged(place, trouble)
        for place, found in scores.items():
            person = replace(self.story.at(place), scores=found, measured=self.story.step)
            self.story = self.story.changed(person)
        self.story = self.story.snapshot()
        best = self.story.best
        assert best is not None, "someone is left, or `_diverged` had said so"
        metrics = {f"member/{place}/accuracy": fmean(found) for place, found in scores.items()}
        return {
            **metrics,
            "population/best_accuracy": fmean(best.scores),
            "population/mean_accuracy": fmean(metrics.values()),
        }

    def _diverged(self, place: int, trouble: str) -> None:
        """Take a broken member out; the others go on."""
        person = self.story.at(place)
        self.people.drop(place)
        self.story = self.story.changed(replace(person, trouble=f"diverged: {trouble}", scores=()))
        self.story = self.story.told(person.name, "diverged", trouble)
        self.recorder.warn(f"member {person.name} diverged and is out until the next selection: {trouble}")
        if not self.people.members:
            raise InvariantError(f"every member diverged; the last: {trouble}")

    def _metrics(self, reports: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Means over the population under the names that a run's metrics have, and each member's own."""
        names = dict.fromkeys(name for report in reports.values() for name in report)
        metrics = {name: fmean(r[name] for r in reports.values() if name in r) for name in names}
        metrics["population/tokens"] = float(self.story.tokens)
        metrics["population/size"] = float(len(self.people.members))
        for place, report in reports.items():
            for name in ("reward/mean", "policy/loss", "policy/kl", "rollout/length"):
                if name in report:
                    metrics[f"member/{place}/{name}"] = report[name]
            for name, value in self.story.at(place).values.items():
                metrics[f"member/{place}/{name}"] = value
        if self.rewards:
            metrics["population/best_reward"] = max(self.rewards.values())
        return metrics

    def _notices(self) -> Iterator[str]:
        bounds = ", ".join(f"{name} {low:g} … {high:g}" for name, (low, high) in self.space.bounds.items())
        yield f"{len(self.people.members)} members on one base; they differ in {bounds}"
        if not self.base.engine.batched:
            yield "members answer one after the other: layers or adapters are not of a kind that is batched"
        yield from self.base.policy.notices()
        yield from self.judge.notices()

    def _save_elite(self) -> MemberRecord | None:
        """Write the fittest member, or the only one, before anything can change it."""
        best = self.story.best or next((p for p in self.story.people if p.trouble is None), None)
        if best is not None:
            write_elite(self.folder, self.people.members[best.place])
        return best

    def _show(self, when: str, result: Evaluation | None) -> None:
        if result is not None:
            self.recorder.evaluation(when, result)

    def _save(self) -> None:
        now = time.monotonic()
        self.story = replace(self.story, seconds=self.story.seconds + now - self.clock)
        self.clock = now
        self._tell({})
        state = {name: value for name, value in self.story.to_json().items() if name != "step"}
        write_checkpoint(self.folder.checkpoints, step=self.story.step, write=self.people.save, state=state)
        prune(self.folder.checkpoints, keep_last=self.config.run.keep_last, best=None)

    def _tell(self, judged: Mapping[str, float]) -> None:
        evolve = {"method": self.config.evolve.method, "bounds": dict(self.space.bounds)}
        told = EvolutionLog(story=self.story, settings=evolve, judged=judged)
        write_atomically(self.folder.path / EVOLUTION, json.dumps(told.to_json(), indent=1))

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
            after: Evaluation | None = None
            best = self._save_elite()
            if not self._more() and best is not None:
                after = self.judge.judge(AFTER, place=best.place, step=self.story.step)
                self._show("after", after)
            self._tell(after.metrics() if after else {})
            write_plots(self.folder, self.story)
            summary = summary_of(self.config, self.story, folder=self.folder, before=self.before, after=after)
            self.recorder.end(summary, stats_of(self.story, before=self.before, after=after))


def evolve(config: Config, *, resume: Path | None = None, task: Task | None = None) -> Path:
    """Search, and return the folder. `resume` goes on, bit for bit, from the last checkpoint."""
    if task is not None:
        leave_task_file(task)
    if config.run.kind != "evolve":
        raise ConfigError(f"these settings are for another command: groupwise {command_of(config)}")
    config = config.resolve()
    task = task or load_task(config.task)
    refuse_what_cannot_be_shared(config, task)
    tracker_names(config.track)
    opening = SearchStart.new(config, task=task.name) if resume is None else SearchStart.again(resume, config)
    if done := opening.already_done(config):
        opening.lock.close()
        open_display().message(done)
        return opening.folder.path

    with (
        isolated(task) as task,
        explain_full_disk(opening.folder, config),
        EvolveRun(config, task=task, opening=opening) as search,
    ):
        for step in search.steps():
            batches = search.collect(step)  # prompt, rollout, reward, advantage: all members at once
            reports = search.learn(step, batches)  # loss, update: one adapter at a time
            search.track(step, reports)  # log, measure, select, checkpoint
    return search.folder.path


def refuse_what_cannot_be_shared(config: Config, task: Task) -> None:
    if not config.lora.r:
        raise ConfigError("members are adapters on one base: set lora.r, such as lora.r=16")
    if task.tools:
        raise ConfigError(f"task {task.name} has tools, which populations do not use yet")
    if config.engine.kind != "own":
        raise ConfigError("the members of a population answer in one batch, by engine.kind=own")
