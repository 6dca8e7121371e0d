"""Videos of agents: the evaluation's own episodes, frame for frame, with their score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxrl import ConfigError, config_for
from flaxrl.configuration import EvalSettings
from flaxrl.trainers import plan
from flaxrl.trainers import video as video_module
from flaxrl.trainers.acting import EvaluationStopped
from flaxrl.trainers.evaluate import Evaluator, evaluate_workdir
from flaxrl.trainers.setup import act_context, build_agent, env_factory, example_input
from flaxrl.trainers.video import Recorder, captioned, check_video, film, fitted
from tests.small_runs import assert_same, host_config, small_config, train

CONFIGS = {"jax": small_config, "host": host_config}
ENVS = {"jax": "tests.drawn_envs:DrawnScripted", "host": "tests.drawn_envs:DrawnHost"}
STRIP = 21
"""Height of the strip with the score above a frame of 240 x 240."""


def drawn_config(kind: str, episode_length: int = 4, **fields: Any) -> Any:
    return CONFIGS[kind](env=config_for(ENVS[kind], episode_length=episode_length), **fields)


def first_state(config: Any) -> tuple[Any, Any, Any]:
    """Agent, parameters and variables of a run's start."""
    spec = env_factory(config)(1).spec
    agent = build_agent(config, spec)
    rngs, context = jax.random.key(3), act_context(jnp.zeros(1), 0.0)
    variables = agent.init(rngs, example_input(agent, spec), None, context, method="act")
    return agent, variables["params"], {}


def times(clip: np.ndarray) -> list[int]:
    """Steps done in each frame, read off its picture: bright cells of the first row, each 30 pixels wide."""
    return [int((frame[STRIP + 15, 15::30, 0] > 0).sum()) for frame in clip]


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_every_row_is_a_frame_and_the_end_stays(kind: str) -> None:
    """Two episodes of 4 actions: rows 0 to 4, the last of them for a second more."""
    config = drawn_config(kind, eval=config_for("eval", video_episodes=2))
    clip = film(config, *first_state(config))
    assert clip.dtype == np.uint8 and clip.shape == (2 * (5 + 20), STRIP + 240, 240, 3)
    assert times(clip) == 2 * [0, 1, 2, 3, 4, *[4] * 20]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["jax", "host"])
def test_its_episodes_are_those_of_the_evaluation(kind: str, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores written into the last frames are the returns that the evaluation of as many episodes had."""
    settings = EvalSettings(episodes=4, greedy=greedy)
    config = drawn_config(kind, 12)
    agent, params, variables = first_state(config)
    evaluator = Evaluator(env_factory(config), agent, settings)
    scores: list[np.ndarray] = []
    play = "_play_host" if kind == "host" else "_play"
    original = getattr(evaluator, play)

    def kept(*args: Any) -> Any:
        answer = original(*args)
        scores.append(np.asarray(answer[0]))
        return answer

    monkeypatch.setattr(evaluator, play, kept)
    evaluator.run(params, variables)
    texts: list[str] = []

    def noted(picture: np.ndarray, text: str) -> np.ndarray:
        texts.append(text)
        return captioned(picture, text)

    monkeypatch.setattr(video_module, "captioned", noted)
    Recorder(env_factory(config), agent, settings, 4).run(params, variables)
    assert [t for t in texts if "step 12 " in t] == [
        f"{i + 1}/4   step 12   return {score:.6g}" for i, score in enumerate(scores[0])
    ]
    assert texts[0] == "1/4   step 0   return 0" and len(texts) == 4 * 13
    if not greedy:
        assert len(set(scores[0])) > 1  # else equal scores would prove nothing


@pytest.mark.parametrize(
    ("length", "most", "shown"),
    [
        (5, 8, [0, 1, 2, 3, 4, 5]),
        (6, 8, [0, 1, 2, 3, 4, 5, 6]),
        (7, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        # 8 frames and the end still to come: every second stays.
        (8, 8, [0, 2, 4, 6, 8]),
        (13, 8, [0, 2, 4, 6, 8, 10, 12, 13]),
        (15, 8, [0, 4, 8, 12, 15]),
        (17, 8, [0, 4, 8, 12, 16, 17]),
        (5, 2, [0, 5]),
    ],
)
def test_of_a_long_episode_every_kth_row_is_shown(
    length: int, most: int, shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drawn_config("host", length)
    agent, *model = first_state(config)
    monkeypatch.setattr(video_module, "captioned", lambda _, text: np.full((1, 1, 3), int(text.split()[2]), np.uint8))
    clip = Recorder(env_factory(config), agent, EvalSettings(video_frames=most), 1).run(*model)
    assert clip[:-20, 0, 0, 0].tolist() == shown and (clip[-20:] == length).all()


def test_a_score_is_drawn_and_fits() -> None:
    picture = np.full((30, 60, 3), 7, np.uint8)
    one, other = (captioned(picture, f"1/3   step 120   return {score}") for score in (13, 14))
    strip = one[:-30]
    assert (one[-30:] == picture).all()
    assert set(np.unique(strip)) == {0, 255} and (strip != other[:-30]).any()
    wide = captioned(np.zeros((30, 600, 3), np.uint8), "1/3   step 120   return 13")
    assert wide.shape[0] > one.shape[0]
    assert (wide[:-30, 400:] == 0).all() and (captioned(picture, "1" * 8)[:-30, 58:] == 0).all()


def test_small_pictures_are_enlarged_and_huge_ones_reduced() -> None:
    small = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    large = fitted(small, None)
    assert (
        large.shape == (240, 240, 3) and (large[::24, ::24] == small).all() and (large[23::24, 23::24] == small).all()
    )
    assert fitted(np.zeros((210, 160, 3), np.uint8), None).shape == (210, 160, 3)
    assert fitted(np.zeros((400, 600, 3), np.uint8), None).shape == (200, 300, 3)
    with pytest.raises(ValueError, match=r"Recorder.render must answer uint8 \[H, W, 3\]; it is float64 \(4, 4\)"):
        fitted(np.zeros((4, 4)), Recorder.__new__(Recorder))


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_it_stops_when_told(kind: str) -> None:
    config = drawn_config(kind)
    agent, *model = first_state(config)
    asked = iter([False, False, True])
    recorder = Recorder(env_factory(config), agent, EvalSettings(), 1, lambda: next(asked))
    with pytest.raises(EvaluationStopped):
        recorder.run(*model)


def test_an_endless_episode_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module, "MAX_STEPS", 6)
    config = drawn_config("host", 100, eval=config_for("eval", video_episodes=1))
    assert times(film(config, *first_state(config)))[:8] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_no_more_is_filmed_than_is_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"EvalSettings\.video_episodes = 3 must be <= its episodes = 2"):
        EvalSettings(episodes=2, video_episodes=3)


@pytest.mark.parametrize(("kind", "name"), [("jax", "Scripted"), ("host", "HostScripted")])
def test_what_draws_nothing_is_named(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name} draws nothing: it has no method `render`"):
        check_video(str(tmp_path / "a.gif"), CONFIGS[kind]())
    check_video(str(tmp_path / "a.gif"), drawn_config(kind))


def test_a_run_that_is_to_be_filmed_is_checked_first() -> None:
    filmed = config_for("eval", video_episodes=1)
    with pytest.raises(ConfigError, match=r"log.writers = .* shows no videos; add 'tensorboard'"):
        plan.check(drawn_config("jax", eval=filmed))
    shown = config_for("log", writers=("json_lines", "tensorboard"))
    plan.check(drawn_config("jax", eval=filmed, log=shown))
    with pytest.raises(ConfigError, match="Scripted draws nothing"):
        plan.check(small_config(eval=filmed, log=shown))


def test_evaluations_of_a_run_go_to_tensorboard(tmp_path: Path) -> None:
    import io

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = drawn_config(
        "host",
        log=config_for("log", writers=("json_lines", "tensorboard")),
        eval=config_for("eval", every=24, episodes=2, video_episodes=1),
    )
    train(config, tmp_path / "filmed")
    reader = EventAccumulator(str(tmp_path / "filmed")).Reload()
    clips = reader.Images("eval/video/0")
    assert [clip.step for clip in clips] == [24, 48]
    with Image.open(io.BytesIO(clips[0].encoded_image_string)) as image:
        assert image.n_frames == 5  # type: ignore[attr-defined]


@pytest.mark.slow
def test_filming_changes_no_number(tmp_path: Path) -> None:
    plain = train(drawn_config("jax"), tmp_path / "plain")
    log = config_for("log", every=10**9, writers=("json_lines", "tensorboard"))
    filmed = train(
        drawn_config("jax", log=log, eval=config_for("eval", episodes=2, video_episodes=1)), tmp_path / "filmed"
    )
    assert_same(filmed.state.params, plain.state.params)


def test_a_folder_is_filmed(tmp_path: Path) -> None:
    from PIL import Image

    train(drawn_config("jax", 2, eval=config_for("eval", episodes=4)), tmp_path / "run")
    target = tmp_path / "new" / "agent.gif"
    metrics = evaluate_workdir(tmp_path / "run", video=str(target))
    assert metrics["eval/episodes"] == 4
    with Image.open(target) as image:
        assert image.n_frames == 3 * 3  # type: ignore[attr-defined] # three episodes of three rows
