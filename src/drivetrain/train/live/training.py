"""live: replicas that go on without a restart when one of them dies or joins.

Every process is a replica of its own. A step is a transaction:

    meet                           who takes part, and in which seat
      a replica that lags behind   takes weights, optimizer and past from one that does not
    deal the step's micro-batches to the seats; forward and backward on one's own
    sum gradients, loss and counts over the seats
    commit?  yes: optimizer step.  no, somebody was lost: the same step again, dealt anew

The global batch never changes, only how many micro-batches each replica works on. A step counts
once it is committed, so no sample is lost or trained twice, whenever a replica dies.
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
    """The same loop, among replicas; its world must be one of a single rank."""
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
        wrong.append(("every replica holds a full copy", remedy))
    if config.reproducibility == "bitwise":
        wrong.append(("sums follow whoever is there", "use reproducibility=standard"))
    if config.max_time_s is not None:
        wrong.append(("replicas cannot agree on max_time_s", "set max_steps"))
    if config.stop_at_step is not None:
        wrong.append(("replicas cannot agree on stop_at_step", "set max_steps"))
    if config.early_stopping.patience is not None or config.early_stopping.limits:
        wrong.append(("replicas cannot agree on early_stopping", "set max_steps"))
    if source.sampler is not None:
        wrong.append(("a sampler's order cannot be dealt anew", "pass the dataset alone"))
    if source.length is None:
        wrong.append(("a stream cannot be dealt anew", "pass a dataset with a length"))
    if num_micro_batches == 1:
        wrong.append(("one micro-batch cannot be shared", "set a smaller micro_batch_size"))
    return [Problem("fault_tolerance", rule, remedy, "live") for rule, remedy in wrong]


@dataclass(kw_only=True)
class LiveLoop(Loop):
    """`Loop`, with a step that may have to be done again."""

    dealt: ElasticFeed
    """The feed, under its own type."""
    saved: Feed
    """The run's own: checkpoints say where it stands, so that any kind of loop can go on."""
    meter: LiveMeter
    """The engine's, likewise."""
    patience_s: float
    """How long a quorum may take: longer than any evaluation or pause of the others."""

    def run(self, total_steps: int | None, num_epochs: int | None) -> None:
        """Train until the steps are through, in whatever company."""
        world = self.engine.world
        self._seat = world.seat if isinstance(world, LiveWorld) else ReplicaRank(0, 1)
        self._replicas = Replicas(world, self.at.step, self.patience_s, self._give, self._take)
        self.dealt.steps_done = self.at.step
        try:
            super().run(total_steps, num_epochs)
        finally:
            self._replicas.leave()

    def _one_step(self, turns: Iterator[Turn]) -> None:  # noqa: ARG002 - dealt after the quorum
        while not self._attempt():
            self.recorder.instant("live_step_again", step=self.at.step)
            self.engine.optimizer.zero_grad()
            self.meter.forget()
            self.timer.begin()
        self.dealt.steps_done = self.at.step
        self.saved.load_state_dict(self.dealt.state_dict())

    def _attempt(self) -> bool:
        """One try at the present step; False when it must be done again."""
        waiting = self.engine.waiting
        with waiting.around():
            met = self._replicas.meet()
        if met is None:
            self._replicas.commit()  # refused; it tells the lighthouse to bring us together
            return False
        self.at.step = met[0]  # further on, when others were
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
        """Forward and backward on this seat's micro-batches."""
        engine, timer = self.engine, self.timer
        turns = self.dealt.deal(self.at.step, self._seat.num_replicas, self._seat.rank)
        head = self.dealt.plan.micro_batches(self.at.step, self._seat.rank)[0]
        self.meter.note_batch(head)  # a seat without samples must know the batch's size too
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
        """For a replica that lags behind. Nothing of it changes before the step is committed."""
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
        """Become what another replica is."""
        optimizer = self.engine.optimizer
        self.engine.spread.inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.engine.learning_rate.load_state_dict(state["learning_rate"])
        if self.engine.scaler is not None:
            self.engine.scaler.load_state_dict(state["scaler"])
        self.meter.adopt(state["past"])
        self.dealt.plan = replace(self.dealt.plan, start=DataPosition(*state["start"]))
