"""live: replicas that continue without a restart when one of them fails or joins.

Every process is a replica. A step is a transaction:

    meet                           which replicas take part, and with which rank
      a replica that lags behind   takes weights, optimizer and past from one that does not
    assign the step's micro-batches to the replicas; forward and backward on this one's share
    sum gradients, loss and counts over the replicas
    commit?  yes: optimizer step.  no (a replica was lost): repeat the step, assigned anew

The global batch never changes, only how many micro-batches each replica computes. A step counts
once it is committed, so no sample is lost or trained twice, whenever a replica fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from torch import nn

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.traits import with_feature
from drivetrain.data.batches import DataPosition
from drivetrain.data.device import to_device
from drivetrain.data.elastic_feed import ElasticFeed
from drivetrain.data.feed import Feed, Turn
from drivetrain.data.sources import Source
from drivetrain.parallel.world import LiveWorld, ReplicaRank
from drivetrain.train.live.meter import LiveMeter
from drivetrain.train.live.replicas import Replicas, State, sum_gradients
from drivetrain.train.loop import Loop


def go_live(loop: Loop, source: Source, config: RunConfig) -> LiveLoop:
    """Return the same loop as a member of the replicas; its world must have a single rank."""
    engine, plan = loop.engine, loop.feed.plan
    problems = _problems(config, source, plan.num_micro_batches)
    if problems:
        raise ConfigError(problems)
    meter = engine.meter = LiveMeter(engine.world)
    feed = ElasticFeed(source, plan, config.seed)
    parts = {each.name: getattr(loop, each.name) for each in fields(Loop)} | {"feed": feed}
    patience_s = config.parallel.timeout_s
    return LiveLoop(**parts, dealt=feed, saved=loop.feed, meter=meter, patience_s=patience_s)


def _problems(config: RunConfig, source: Source, num_micro_batches: int) -> list[Problem]:
    wrong: list[tuple[str, str]] = []
    if "live" not in config.parallel.traits.combines_with:
        remedy = f"use parallel.strategy={with_feature('live')}"
        wrong.append(("every replica needs a full copy of the model", remedy))
    if config.reproducibility == "bitwise":
        wrong.append(("sums depend on which replicas take part", "use reproducibility=standard"))
    if config.max_time_s is not None:
        wrong.append(("replicas cannot agree on max_time_s", "set max_steps"))
    if config.stop_at_step is not None:
        wrong.append(("replicas cannot agree on stop_at_step", "set max_steps"))
    if config.early_stopping.patience is not None or config.early_stopping.limits:
        wrong.append(("replicas cannot agree on early_stopping", "set max_steps"))
    if source.sampler is not None:
        wrong.append(("a sampler's order cannot be redistributed", "pass the dataset alone"))
    if source.length is None:
        wrong.append(("a stream cannot be redistributed", "pass a dataset with a length"))
    if num_micro_batches == 1:
        wrong.append(("a single micro-batch cannot be divided", "set a smaller micro_batch_size"))
    return [Problem("fault_tolerance", rule, remedy, "live") for rule, remedy in wrong]


@dataclass(kw_only=True)
class LiveLoop(Loop):
    """`Loop` with steps that may have to be repeated."""

    dealt: ElasticFeed
    """The loop's feed, with its own type."""
    saved: Feed
    """The run's own feed: checkpoints store its position, so any kind of loop can resume."""
    meter: LiveMeter
    """The engine's meter, with its own type."""
    patience_s: float
    """Time limit of a quorum: longer than any evaluation or pause of the other replicas."""

    def run(self, total_steps: int | None, num_epochs: int | None) -> None:
        """Train until the last step, with whichever replicas are present."""
        world = self.engine.world
        self._seat = world.seat if isinstance(world, LiveWorld) else ReplicaRank(0, 1)
        self._replicas = Replicas(world, self.at.step, self.patience_s, self._give, self._take)
        self.dealt.steps_done = self.at.step
        try:
            super().run(total_steps, num_epochs)
        finally:
            self._replicas.leave()

    def _one_step(self, turns: Iterator[Turn]) -> None:  # noqa: ARG002 - assigned after the quorum
        while not self._attempt():
            self.recorder.instant("live_step_again", step=self.at.step)
            self.engine.optimizer.zero_grad()
            self.meter.forget()
            self.timer.begin()
        self.dealt.steps_done = self.at.step
        self.saved.load_state_dict(self.dealt.state_dict())

    def _attempt(self) -> bool:
        """Try the current step; False if it must be repeated."""
        waiting = self.engine.waiting
        with waiting.around():
            met = self._replicas.meet()
        if met is None:
            self._replicas.commit()  # refused; asks the lighthouse for a new quorum
            return False
        self.at.step = met[0]  # later, if the others were ahead
        self._sit_down(*met[1:])
        self._train_share()
        sums = self.meter.own()
        with waiting.around():
            if self._seat.num_replicas > 1:
                sums = sum_gradients(self._parameters, sums, self._replicas)
            if not self._replicas.commit():
                return False
        self.meter.settle(sums.tolist())
        self.move()
        return True

    def _sit_down(self, rank: int, num_replicas: int) -> None:
        if (rank, num_replicas) != (self._seat.rank, self._seat.num_replicas):
            self._seat.rank, self._seat.num_replicas = rank, num_replicas
            self.recorder.instant("live_quorum", step=self.at.step, seat=rank, seats=num_replicas)

    def _train_share(self) -> None:
        """Forward and backward on this replica's micro-batches."""
        engine, timer = self.engine, self.timer
        turns = self.dealt.deal(self.at.step, self._seat.num_replicas, self._seat.rank)
        head = self.dealt.plan.micro_batches(self.at.step, self._seat.rank)[0]
        self.meter.note_batch(head)  # a replica without samples needs the batch size too
        self._turn_epoch(head.epoch)
        self.notify("on_train_batch_start", self.at.step + 1)
        asked = timer.now()
        for micro, batch in turns:
            timer.waited_for_data(asked)
            with engine.micro_batch(micro, is_last=True):
                with engine.autocast:
                    loss = self.task.loss(engine.model, to_device(batch, engine.world.device))
                engine.backward(loss, micro)
            asked = timer.now()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.engine.optimizer.param_groups for p in group["params"]]

    def _give(self) -> State:
        """Return the state for a replica that lags behind; constant until the step commits."""
        model, scaler = self.engine.spread.inner, self.engine.scaler
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return {
            "model": {**model.state_dict(), **buffers},  # a forward pass may write to buffers
            "optimizer": self.engine.optimizer.state_dict(),
            "learning_rate": self.engine.learning_rate.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "past": self.meter.past(),
            "start": list(self.dealt.plan.start),
        }

    def _take(self, state: State) -> None:
        """Take another replica's state."""
        optimizer = self.engine.optimizer
        self.engine.spread.inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.engine.learning_rate.load_state_dict(state["learning_rate"])
        if self.engine.scaler is not None:
            self.engine.scaler.load_state_dict(state["scaler"])
        self.meter.adopt(state["past"])
        self.dealt.plan = replace(self.dealt.plan, start=DataPosition(*state["start"]))
