"""What a loss is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from flaxrl.types import Array, LossOutput, Metrics, Output, Params, TrainState, Trajectory

MINIBATCHES = ("sequences", "steps")
"""Units of which a loss takes minibatches."""


class Unroll(Protocol):
    """The model, bound to a run: runs over a batch's inputs `[T+1, B, ...]` from its stored carry."""

    def __call__(self, params: Params, batch: Any, rngs: dict[str, Array] | None = None) -> Output:
        """Returns the model's Output for `batch.inputs`; `rngs` feeds streams such as 'dropout'."""
        ...


@dataclass(frozen=True)
class Loss:
    """Scores a trajectory. Fields are hyper-parameters, so config keys; subclasses check them in `__post_init__`.

    Nothing else belongs there: schedules and sweeps put other values into the fields of a copy, and `__post_init__`
    does not run again (a sweep of a loss that keeps more than its fields is refused).

    Trajectories arrive sanitized: masked rows hold zeros, so also action 0, which may be illegal there, and its
    log-probability is then -inf. `masked_mean(x, mask)` drops such a row; where it meets something differentiable
    first, write `jnp.where(mask, log_prob, 0.0)`.

    A metric is the mean over a trajectory's gradient steps; one whose name begins with 'first_' is that of the first.

    Attributes:
        minibatch: 'sequences' splits minibatches along B; 'steps' flattens time and shuffles rows (for losses whose
            `prepare` answers a batch of `[T, B, ...]` leaves; refused for agents with a carry).
        uses_target: whether the loss reads `target_params`.
    """

    minibatch: ClassVar[str] = "sequences"
    uses_target: ClassVar[bool] = False

    def at(self, progress: Array) -> Loss:
        """The loss with its hyper-parameters where the fraction `progress` (float32) of the run is done.

        Default: itself, so they are constant. A loss with schedules returns `with_values(self, field=value)`.
        """
        del progress
        return self

    def stop(self, metrics: Metrics) -> Array | None:
        """Whether the trajectory's remaining epochs are to be skipped, asked after each.

        Args:
            metrics: means over the epoch, under the names that the loss gave them. While the program is made it is
                asked once with 0 under any name, to see whether the answer is None.

        Returns:
            A bool scalar; None (the default) where they never are.
        """
        del metrics
        return None

    def check_epochs(self, epochs: int) -> None:
        """Raises ConfigError where a field has no meaning with `learner.epochs`; called before anything compiles."""
        del epochs

    def prepare(self, unroll: Unroll, state: TrainState, trajectory: Trajectory) -> Any:
        """Once a trajectory, before its epochs: what the loss learns from (PPO: advantages). Default: the trajectory.

        Args:
            unroll: the model.
            state: before the update; its parameters acted or are a few updates newer.
            trajectory: sanitized, inputs `[T+1, B, ...]`.

        Returns:
            A batch with `inputs` and `carry`, as `unroll` needs; gradients do not flow through it.
        """
        del unroll, state
        return trajectory

    def __call__(
        self, unroll: Unroll, params: Params, target_params: Params | None, batch: Any, rngs: dict[str, Array]
    ) -> tuple[Array, LossOutput]:
        """The scalar to minimise, and metrics.

        Args:
            unroll: the model.
            params: differentiated.
            target_params: of the target network, or None.
            batch: what `prepare` gave, or a minibatch of it.
            rngs: keys of the model's random streams.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


S = TypeVar("S")


def with_values(settings: S, **values: Any) -> S:
    """A copy of a loss or optimizer with other values in some fields, traced ones too.

    `__post_init__` does not run: nothing is checked again, and what it computed from a field stays as it was.
    """
    copy = object.__new__(type(settings))
    copy.__dict__.update(settings.__dict__ | values)
    return copy
