"""TOML into settings: what a person typed is used as meant, or refused by name with what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from tree import ROOT

from asyncrl.configs import Config, apply_overrides, build, dump_config, load_config, read_toml, to_table
from asyncrl.errors import ConfigError


class Mode(StrEnum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    mode: Mode = Mode.FAST
    learning_rate: float = 1e-5
    steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    path: Path
    learner: Inner = field(default_factory=Inner)
    names: tuple[str, ...] = ()
    on: bool = False


def test_nested_tables_become_nested_settings_and_back() -> None:
    table = {"path": "a/b", "learner": {"learning_rate": 1, "mode": "exact", "extra": {"x": [1, 2]}}, "names": ["p"]}
    settings = build(Outer, table)
    assert settings == Outer(
        path=Path("a/b"), learner=Inner(learning_rate=1.0, mode=Mode.EXACT, extra={"x": [1, 2]}), names=("p",)
    )
    assert build(Outer, to_table(settings)) == settings
    assert type(to_table(settings)["learner"]["mode"]) is str


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"path": "x", "learner": {"lerning_rate": 1}}, r"'lerning_rate' in \[learner\]; did you mean 'learning_rate'"),
        ({"path": "x", "leaner": {}}, "unknown section 'leaner'; did you mean 'learner'"),
        ({"path": "x", "zzz": {}}, "unknown section 'zzz'; allowed: learner, names, on, path"),
        ({"path": "x", "learner": {"steps": "three"}}, r"steps \(\[learner\]\): expected `int`, got `str`"),
        ({"path": "x", "learner": {"steps": 2.5}}, r"steps \(\[learner\]\)"),
        ({"path": "x", "learner": {"betas": [0.9]}}, r"betas \(\[learner\]\)"),
        ({"path": "x", "learner": 3}, "learner must be a section, got 3"),
        ({"path": "x", "on": "yes"}, r"\[on\]: expected `bool`"),
        ({"path": "x", "learner": {"mode": "fasst"}}, r"mode \(\[learner\]\) must be one of fast, exact, got 'fasst'"),
        ({"path": 3}, "path.* must be a path, got 3"),
        ({}, r"\[path\] must be given"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(Outer, table)


def test_overrides_are_toml_values_or_text() -> None:
    tables = {"learner": {"steps": 1}, "path": "x"}
    changed = apply_overrides(
        tables, ["learner.steps=5", "learner.loss=gspo", 'learner.name="a b"', "learner.extra.x=[1]"]
    )
    assert changed["learner"] == {"steps": 5, "loss": "gspo", "name": "a b", "extra": {"x": [1]}}
    assert tables["learner"] == {"steps": 1}


@pytest.mark.parametrize("override", ["steps", "steps=3", ".steps=3", "path.steps=3"])
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({"path": "x"}, [override])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_resolves_and_survives_being_written_down(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    written = tmp_path / path.name
    written.write_text(dump_config(config))
    assert load_config(written) == config


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run]\nsteps = = 3\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML.*line 2"):
        read_toml(broken)
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(tmp_path)


MINIMAL = {"model": {"path": "m"}, "environment": {"name": "bugfix"}}
UNWATCHED = ["learner.diagnostics=false", "guards.ratio=off", "guards.ess=off", "guards.entropy=off"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.loss=dpo", "buffer.group_size=1"], "group_size must be >= 2 with loss = 'dpo'"),
        (["buffer.group_size=1"], "a group of one has no baseline"),
        (
            ["learner.diagnostics=false", "guards.ess=off"],
            r"false \(\[learner\]\) measures nothing that ratio = 'warn', entropy = 'warn' \(\[guards\]\)",
        ),
        ([*UNWATCHED, "guards.controller=learning_rate"], "nothing that controller = 'learning_rate'"),
        ([*UNWATCHED, "learner.entropy_target=0.5"], r"nothing that entropy_target \(\[learner\]\) would act on"),
        (["environment.options.teacher_prompts=true"], r"needs a teacher: set source \(\[learner.teacher\]\)"),
        (["learner.loss=distillation", "learner.teacher.source=self"], "needs teacher_prompts = true"),
        (
            [
                "learner.loss=opd",
                "learner.teacher.source=engine",
                "learner.teacher.url=http://h",
                "sampling.temperature=0.7",
            ],
            r"temperature must be 1 with source = 'engine' \(\[learner.teacher\]\)",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(Config, apply_overrides(MINIMAL, overrides))


def test_guards_that_need_no_diagnostics_may_stay_without_them() -> None:
    config = build(Config, apply_overrides(MINIMAL, [*UNWATCHED, "guards.sync=stop", "guards.nonfinite=pause"]))
    assert not config.learner.diagnostics


def test_a_loss_without_an_advantage_needs_no_group() -> None:
    config = build(Config, apply_overrides(MINIMAL, ["buffer.group_size=1", "learner.loss=rejection_sft"]))
    assert config.buffer.group_size == 1
    averaged = ["learner.loss=distillation", "learner.teacher.source=self", "learner.teacher.ema_rate=0.1"]
    assert build(Config, apply_overrides(MINIMAL, [*averaged, "buffer.group_size=1"])).learner.teacher.ema_rate == 0.1
