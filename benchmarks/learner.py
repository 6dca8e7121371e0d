"""How fast the learner is: each torso and loss against its plain `nn.Conv` twin and this machine's matrix product.

    python -m benchmarks.learner [--torsos nature resnet] [--cores feed_forward lstm] [--profile FOLDER]

An update is what a run's learner does with one batch of made-up frames: loss, gradient, Adam. A batch of unroll T
and B envs is (T + 1) x B rows. Ours and the twin take turns, so that what else the machine does meets both. The ceiling
is the rate of a 2048 x 2048 x 2048 float32 product, measured in between, over the FLOPs of a row: 3 x those of a
frame's forward pass, and 4 x for PPO, which values all rows before it learns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that the file runs as a script, too

from benchmarks.report import Rate, print_json, print_table, rate_of, trace
from benchmarks.twins import FORWARD_FLOPS, TWINS
from flaxrl.configuration import MeshSettings
from flaxrl.envs.spec import ArraySpec, Discrete, EnvSpec
from flaxrl.losses.base import Loss
from flaxrl.losses.ppo import PPO
from flaxrl.losses.vtrace import VTrace
from flaxrl.models.agent import Agent
from flaxrl.models.cores import LSTM, FeedForward
from flaxrl.models.heads import PolicyValue
from flaxrl.models.policies import Sampled
from flaxrl.models.torsos import ImpalaResNet, MinAtarCNN, NatureCNN
from flaxrl.trainers.optimizer import Optimizer
from flaxrl.trainers.setup import init_state
from flaxrl.trainers.sharding import bind_unroll, make_mesh, to_global
from flaxrl.trainers.update import make_update
from flaxrl.types import MID, AgentInput, Trajectory

ATARI = EnvSpec(ArraySpec((4, 84, 84), np.uint8), Discrete(6))
TORSOS: dict[str, tuple[Any, EnvSpec]] = {
    "nature": (NatureCNN(channels_first=True), ATARI),
    "resnet": (ImpalaResNet(channels_first=True), ATARI),
    "minatar": (MinAtarCNN(), EnvSpec(ArraySpec((10, 10, 6), np.bool_), Discrete(6))),
}
LOSSES: dict[str, Callable[[str], Loss]] = {
    "vtrace": lambda core: VTrace(),
    "ppo": lambda core: PPO(minibatch="steps" if core == "feed_forward" else "sequences"),
}
"""Of a core."""

PASSES = {"vtrace": 3, "ppo": 4}
"""Forward passes that an update is worth: a backward pass is two, and PPO values the batch before it learns."""

MATMUL = 2048


def make_agent(torso: Any, core: str, dtype: str, chunk: int | None) -> Agent:
    """An agent around a torso."""
    memory: Any = FeedForward() if core == "feed_forward" else LSTM(256, dtype=dtype)
    action = ATARI.action
    return Agent(torso.clone(dtype=dtype), memory, PolicyValue(action), Sampled(), action, torso_chunk=chunk)


def made_up(agent: Agent, spec: EnvSpec, unroll: int, batch: int, mesh: Any) -> Trajectory:
    """A trajectory of noise."""
    rng = np.random.default_rng(0)
    observation: Any = spec.observation
    pixels = rng.integers(0, 256, (unroll + 1, batch, *observation.shape), np.uint8)
    zeros = np.zeros((unroll, batch), np.float32)
    shapes = jax.eval_shape(lambda: agent.core.initial_carry(batch))  # type: ignore[attr-defined]
    carry = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), shapes)
    return to_global(
        Trajectory(
            inputs=AgentInput(
                observation=pixels if observation.dtype == np.uint8 else pixels > 200,
                step_type=np.full((unroll + 1, batch), MID, np.int8),
            ),
            action=rng.integers(0, 6, (unroll, batch), np.int32),
            reward=rng.normal(size=(unroll, batch)).astype(np.float32),
            discount=zeros + 1,
            log_prob=zeros - np.log(6).astype(np.float32),
            value=zeros,
            carry=carry,
        ),
        mesh,
    )


class Learner:
    """A jitted update, its state and a batch that it learns from again and again."""

    def __init__(self, agent: Agent, spec: EnvSpec, loss: Any, options: argparse.Namespace):
        settings, optimizer = MeshSettings(), Optimizer(learning_rate=1e-4)
        mesh = make_mesh(settings)
        self.rows = (options.unroll + 1) * options.batch
        self._state = init_state(agent, spec, optimizer, settings, mesh, 0, target=loss.uses_target)
        self._batch = made_up(agent, spec, options.unroll, options.batch, mesh)
        update = make_update(
            loss,
            lambda variables: bind_unroll(agent, variables, mesh),
            mesh,
            learning_rate=optimizer.learning_rate_at,
            progress=lambda updates: updates / 1e6,
            minibatches=options.minibatches,
        )
        self._key = jax.random.key(0)
        shardings = jax.tree.map(lambda x: x.sharding, self._state)
        self._update = jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None))

    def __call__(self) -> float:
        """One update, to its end; its rows."""
        self._state, _ = self._update(self._state, self._batch, self._key)
        jax.block_until_ready(self._state)
        return self.rows

    def temporary_mib(self) -> float:
        """Memory that the compiled update takes besides its arguments."""
        compiled = self._update.lower(self._state, self._batch, self._key).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes / 2**20


def matmul() -> Callable[[], float]:
    """A large float32 product, in FLOPs."""
    x = jnp.ones((MATMUL, MATMUL))
    product = jax.jit(jnp.matmul)

    def call() -> float:
        product(x, x).block_until_ready()
        return 2.0 * MATMUL**3

    return call


def take_turns(contestants: dict[str, Callable[[], float]], seconds: float, repeats: int) -> dict[str, Rate]:
    """Units a second of each; every round gives each its seconds, in whole calls, after one that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            call()
            began, units = time.perf_counter(), 0.0
            while time.perf_counter() - began < seconds:
                units += call()
            rates[name].append(units / (time.perf_counter() - began))
    return {name: rate_of(values) for name, values in rates.items()}


def compare(torso: str, core: str, loss: str, options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, float]]:
    """Table rows and ratios of one torso, core and loss."""
    module, spec = TORSOS[torso]
    ours = Learner(make_agent(module, core, options.dtype, None), spec, LOSSES[loss](core), options)
    contestants: dict[str, Callable[[], float]] = {"matmul": matmul(), "flaxrl": ours}
    if not options.no_twin:
        twin = make_agent(TWINS[torso](), core, options.dtype, 0)
        contestants["nn.Conv"] = Learner(twin, spec, LOSSES[loss](core), options)
    rates = take_turns(contestants, options.seconds, options.repeats)
    flops = PASSES[loss] * FORWARD_FLOPS[torso]
    ceiling = rates["matmul"].median / flops
    plain = {"feed_forward", "vtrace"}  # what a name without them stands for
    name = "_".join([torso, *(part for part in (core, loss) if part not in plain)])
    ratios = {f"{name}_rows_per_second": rates["flaxrl"].median, f"{name}_of_ceiling": rates["flaxrl"].median / ceiling}
    if not options.no_twin:
        ratios[f"{name}_vs_conv"] = rates["flaxrl"].median / rates["nn.Conv"].median
    rows = [
        [name, who, rates[who], rates[who].median / ours.rows, rates[who].median / ceiling, learner.temporary_mib()]
        for who, learner in contestants.items()
        if isinstance(learner, Learner)
    ]
    ratios[f"{name}_matmul_gflops"] = rates["matmul"].median / 1e9
    return rows, ratios


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torsos", nargs="+", choices=TORSOS, default=list(TORSOS))
    parser.add_argument("--cores", nargs="+", choices=("feed_forward", "lstm"), default=["feed_forward"])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--unroll", type=int, default=20, help="T")
    parser.add_argument("--batch", type=int, default=32, help="B")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each turn lasts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-twin", action="store_true", help="leaves the plain nn.Conv networks out")
    parser.add_argument("--profile", metavar="FOLDER", help="writes a JAX trace there")
    options = parser.parse_args(argv)
    table: list[list[Any]] = [["network", "learner", "rows/s", "updates/s", "of the ceiling", "temporary MiB"]]
    ratios: dict[str, float] = {}
    with trace(options.profile):
        for torso, core, loss in itertools.product(options.torsos, options.cores, options.losses):
            rows, found = compare(torso, core, loss, options)
            table += rows
            ratios |= found
    print_table(table)
    print_json(ratios)
    return ratios


if __name__ == "__main__":
    main()
