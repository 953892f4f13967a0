"""Overrides and files become a typed experiment, or an error that names the field."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from headway.orchestrator import Experiment, Retries, Scaling, resolve
from headway.orchestrator.config.coerce import coerce, parse_yaml, render_yaml
from headway.orchestrator.config.loader import _leaves, differences, from_plain, from_yaml, override, to_plain, to_yaml
from headway.trainer import CheckpointConfig, Duration, LossSpikeConfig, ParallelConfig, Trainer, TrainerConfig
from headway.trainer.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Layer:
    width: int = 8
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RichConfig(TrainerConfig):
    learning_rate: float = field(default=1e-3, metadata={"deprecated_names": ("lr",)})
    hidden: tuple[int, ...] = (8, 8)
    betas: tuple[float, float] = (0.9, 0.95)
    names: list[str] = field(default_factory=list)
    layers: tuple[Layer, ...] = (Layer(),)
    head: Layer | None = None
    warmup: Duration | None = None
    mode: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    folder: Path = Path("data")
    either: int | str = 0
    extra: dict[str, float] = field(default_factory=dict)
    anything: Any = None
    flag: bool = False


class RichTrainer(Trainer[RichConfig]):
    pass


@dataclass(frozen=True, kw_only=True)
class NeedsConfig(TrainerConfig):
    data: str


class NeedsTrainer(Trainer[NeedsConfig]):
    pass


def config_of(*overrides: str) -> RichConfig:
    found = resolve(RichTrainer, overrides).config
    assert isinstance(found, RichConfig)
    return found


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("config.learning_rate=3e-4", 3e-4),
        ("config.learning_rate=1", 1.0),
        ("config.hidden=[16, 32]", (16, 32)),
        ("config.hidden=[]", ()),
        ("config.betas=[0.5, 1]", (0.5, 1.0)),
        ("config.names=[no, 1e3, yes]", ["no", "1e3", "yes"]),
        ("config.layers=[{width: 3}, {dropout: 0.5}]", (Layer(width=3), Layer(dropout=0.5))),
        ("config.head={width: 4}", Layer(width=4)),
        ("config.head.width=4", Layer(width=4)),
        ("config.warmup=2h30m", Duration(9000, "seconds")),
        ("config.warmup=100", Duration(100, "steps")),
        ("config.warmup=null", None),
        ("config.max_steps=7", 7),
        ("config.max_steps=null", None),
        ("config.mode=b", "b"),
        ("config.colour=red", Colour.RED),
        ("config.folder=/a/b", Path("/a/b")),
        ("config.either=5", 5),
        ("config.either=five", "five"),
        ("config.either='5'", "5"),
        ("config.extra={a: 1}", {"a": 1.0}),
        ("config.extra.a=2.5", {"a": 2.5}),
        ("config.anything=[1, x, 2.0]", [1, "x", 2.0]),
        ("config.flag=true", True),
        ("config.checkpoint.keep_last=all", "all"),
        ("config.checkpoint.keep_last=3", 3),
    ],
)
def test_a_value_becomes_what_its_field_wants(override: str, value: Any) -> None:
    path = override.partition("=")[0].split(".")
    path = path[:2] if path[1] in ("head", "extra") else path
    found: Any = config_of(override)
    for name in path[1:]:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("config.lerning_rate=1", "did you mean config.learning_rate?"),
        ("learning_rate=1", "did you mean config.learning_rate?"),
        ("wrokers=2", "did you mean scaling.workers?"),
        ("batch_size=8", "did you mean config.global_batch_size?"),
        ("config.batch_size=8", "did you mean config.global_batch_size?"),
        ("config.strategy=fsdp", "did you mean config.parallel.strategy?"),
        ("config.parallel.stratgy=ddp", "did you mean config.parallel.strategy?"),
        ("config.zzz=1", "it has max_epochs, max_steps"),
        ("config.learning_rate=fast", "config.learning_rate=fast: input should be a valid number"),
        ("config.learning_rate=true", "config.learning_rate=True"),
        ("config.max_steps=2.5", "config.max_steps=2.5"),
        ("config.max_steps=-1", "config.max_steps must be an integer >= 1, got -1"),
        ("config.flag=1", "config.flag=1: input should be a valid boolean"),
        ("config.mode=c", "config.mode=c: input should be 'a' or 'b'"),
        ("config.hidden=8", "config.hidden=8 must be tuple[int, ...], as [8]"),
        ("config.hidden=[8, x]", "config.hidden[1]=x"),
        ("config.betas=[1]", "config.betas=[1] must have 2 items, got 1"),
        ("config.layers=[{widht: 1}]", "did you mean config.layers[0].width?"),
        ("config.warmup=2 months", "config.warmup=2 months"),
        ("config.log_every=10s", "config.log_every must be in steps or epochs"),
        ("config.parallel=ddp", "set its fields, as in config.parallel.field=value"),
        ("config.extra=1", "config.extra=1"),
        ("config.anything=[1", "config.anything=[1 is not valid YAML"),
        ("scaling.workers=0", "scaling.workers must be an integer >= 1, got 0"),
        ("scaling.workers=two", "scaling.workers=two"),
        ("retries.max_failures=-1", "retries.max_failures must be an integer >= 0"),
        ("name=a/b", "and . _ -, got 'a/b'"),
        ("storage=memory://x", "memory of one process"),
        ("max_steps", "is not an override: write path=value"),
        ("trainer=x", "use another target"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_field(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(override)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_field_cannot_be_set_as_a_whole_and_in_part() -> None:
    with pytest.raises(ConfigError, match="as a whole and in part"):
        config_of("config.extra=1", "config.extra.a=1")


def test_an_old_name_works_with_one_warning() -> None:
    with pytest.warns(FutureWarning, match=r"config.lr is now called config.learning_rate") as warned:
        assert config_of("config.lr=0.5").learning_rate == 0.5
    assert len(warned) == 1
    with pytest.raises(ConfigError, match="the old name"):
        config_of("config.lr=0.5", "config.learning_rate=0.5")


def test_an_experiment_keeps_what_is_not_overridden(tmp_path: Path) -> None:
    experiment = Experiment(
        name="a",
        trainer=RichTrainer,
        config=RichConfig(max_epochs=3, head=Layer(width=2, dropout=0.5)),
        scaling=Scaling(workers=2),
        storage=str(tmp_path),
    )
    found = resolve(experiment, ["config.head.width=9", "retries.max_failures=0"])
    assert found.config == RichConfig(max_epochs=3, head=Layer(width=9, dropout=0.5))
    assert (found.scaling, found.retries) == (Scaling(workers=2), Retries(max_failures=0))
    assert experiment.config == RichConfig(max_epochs=3, head=Layer(width=2, dropout=0.5))


def test_a_trainer_class_is_an_experiment_of_its_own_name() -> None:
    found = resolve(RichTrainer)
    assert (found.name, found.trainer, found.config) == ("rich-trainer", RichTrainer, RichConfig())
    assert resolve(RichTrainer, ["name=other"]).name == "other"


def test_a_field_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"config.data is required: set config.data=..."):
        resolve(NeedsTrainer)
    assert resolve(NeedsTrainer, ["config.data=here"]).config == NeedsConfig(data="here")


def test_a_trainer_takes_its_own_config() -> None:
    with pytest.raises(ConfigError, match="must be a RichConfig for RichTrainer, got a TrainerConfig"):
        Experiment(name="a", trainer=RichTrainer, config=TrainerConfig())


experiments = st.builds(
    Experiment,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True),
    trainer=st.just(RichTrainer),
    config=st.builds(
        RichConfig,
        learning_rate=st.floats(allow_nan=False),
        hidden=st.lists(st.integers(), max_size=3).map(tuple),
        names=st.lists(
            st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("C",)), max_size=6), max_size=3
        ),
        layers=st.lists(st.builds(Layer, width=st.integers()), max_size=2).map(tuple),
        head=st.none() | st.builds(Layer, dropout=st.floats(allow_nan=False)),
        warmup=st.none() | st.builds(Duration, st.integers(1, 10**6), st.sampled_from(["steps", "epochs", "seconds"])),
        either=st.integers() | st.sampled_from(["null", "1", "1e3", "true", "", "~", "x: y", "#", "no", ".5", "-"]),
        extra=st.dictionaries(st.sampled_from(["a", "1", "null", "x y"]), st.floats(allow_nan=False)),
        max_steps=st.none() | st.integers(1),
        seed=st.integers(0, 2**63 - 1),
        flag=st.booleans(),
    ),
    scaling=st.builds(Scaling, workers=st.integers(1, 64), cpus_per_worker=st.sampled_from([0.5, 1, 2])),
)


@settings(deadline=None)
@given(experiments)
def test_a_config_file_and_back_is_identity(experiment: Experiment) -> None:
    assert from_yaml(to_yaml(experiment)) == experiment
    assert from_plain(to_plain(experiment)) == experiment


def test_every_field_of_the_trainer_has_a_path_that_says_what_it_holds() -> None:
    """This includes new fields. The command line accepts every value that the file has."""
    config = RichConfig(
        max_steps=7, max_grad_value=0.5, grad_norm_groups=("model.*",), freeze=("*", "!model.head.*"), init_from="a/b",
        evaluate_batches=3, loss_spike=LossSpikeConfig(), precision="bf16-true", seed=0,
        parallel=ParallelConfig(
            strategy="hsdp", dp_shard=2, shard_modules=("Block",), cpu_offload=True,
            activation_checkpointing="selective", step_timeout=Duration(300, "seconds"),
        ),
        checkpoint=CheckpointConfig(every=None, keep_last="all", mode="max", save_best=True),
    )  # fmt: skip
    experiment = Experiment(name="rich-trainer", trainer=RichTrainer, config=config)
    assert from_yaml(to_yaml(experiment)) == experiment
    overrides = [
        f"{path}={render_yaml(value).removesuffix('...' + chr(10)).strip()}"
        for path, value in _leaves(to_plain(experiment))
        if path != "trainer"
    ]
    assert {f"config.{each.name}" for each in fields(TrainerConfig)} <= {
        ".".join(each.partition("=")[0].split(".")[:2]) for each in overrides
    }
    assert resolve(RichTrainer, overrides) == experiment


@settings(deadline=None)
@example(["\x85", "a\u2028b", "c\u2029"])
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_plain_values_survive_yaml(value: Any) -> None:
    assert coerce(parse_yaml(render_yaml([value])), list[Any], "x", lambda *_: None) == [value]


def test_scalars_of_numpy_are_saved_and_set_as_python_numbers() -> None:
    numbers = RichConfig(learning_rate=np.float64(0.5), anything=[np.int64(3), np.str_("a")], flag=np.bool_(True))
    assert "learning_rate: 0.5\n" in to_yaml(Experiment(name="a", trainer=RichTrainer, config=numbers))
    found = to_plain(numbers)
    assert repr([found[name] for name in ("learning_rate", "anything", "flag")]) == "[0.5, [3, 'a'], True]"
    values = {"hidden": [np.int64(4)], "either": np.int64(2), "learning_rate": np.float32(0.25), "mode": np.str_("b")}
    changed = override(RichConfig(), {**values, "flag": np.bool_(True), "anything": [np.int64(3)]})
    found = [changed.hidden, changed.either, changed.learning_rate, changed.mode, changed.flag, changed.anything]
    assert repr(found) == "[(4,), 2, 0.25, 'b', True, [3]]"
    with pytest.raises(ConfigError, match="is a longdouble, which cannot be saved"):
        to_plain(np.longdouble(1))


def test_what_a_file_cannot_hold_is_refused() -> None:
    experiment = Experiment(name="a", trainer=RichTrainer, config=RichConfig(anything=len))
    with pytest.raises(ConfigError, match=r"config.anything is a builtin_function_or_method"):
        to_yaml(experiment)


def test_differences_are_told_by_dotted_path() -> None:
    before = to_plain(resolve(RichTrainer))
    after = to_plain(resolve(RichTrainer, ["config.learning_rate=1", "config.head.width=3"]))
    found = {each.path: (each.before, each.after) for each in differences(before, after)}
    assert found["config.learning_rate"] == (1e-3, 1.0)
    assert found["config.head.width"] == (None, 3)
    assert differences(before, before) == []


def test_a_config_of_a_local_class_says_why_it_cannot_be_read() -> None:
    module = textwrap.dedent("""
        from __future__ import annotations
        from dataclasses import dataclass
        from headway.trainer import TrainerConfig
        @dataclass(frozen=True, kw_only=True)
        class Odd(TrainerConfig):
            what: Missing = None
    """)
    names: dict[str, Any] = {"__name__": __name__}
    exec(module, names)
    odd = type("OddTrainer", (Trainer,), {"__orig_bases__": (Trainer[names["Odd"]],)})
    with pytest.raises(ConfigError, match="the type hints of Odd cannot be resolved"):
        resolve(odd, ["config.what=1"])
