"""Plan: a value that can be read, edited, saved and loaded, with no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardfit import MeshShape, Plan, Precision, ShardfitError, Unit

FULL = Plan(
    units=(
        Unit(paths=("embed",), why="large", num_params=12),
        Unit(paths=("layers.0", "layers.1"), reshard=2),
        Unit(paths=("norm", "head"), reshard=False),
        Unit(paths=("",), reshard=False),
    ),
    mesh=MeshShape(replicate=2, shard=4, tensor=2),
    precision=Precision(param="bfloat16", output="float32", cast_inputs=False),
    offload=True,
    checkpointing="selective",
    compile=True,
    prefetch=2,
    methods=("encode",),
)


def test_json_round_trip(tmp_path):
    FULL.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == FULL
    assert Plan.load(str(tmp_path / "plan.json")).digest() == FULL.digest()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_toml(tmp_path):
    (tmp_path / "plan.toml").write_text(
        """
        checkpointing = "full"
        [mesh]
        replicate = 2
        [[units]]
        paths = ["layers.0"]
        reshard = false
        [[units]]
        paths = [""]
        """
    )
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.units == (Unit(paths=("layers.0",), reshard=False), Unit(paths=("",)))
    assert plan.mesh == MeshShape(replicate=2)
    assert plan.checkpointing == "full"


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "plan.json"
    FULL.save(file)
    before = file.read_text()
    with pytest.raises(TypeError):
        FULL.replace(offload=object()).save(file)
    assert file.read_text() == before


def test_precision_fills_in_what_follows_from_param():
    assert Precision(param="bfloat16") == Precision(param="bfloat16", reduce="float32", master="float32")
    assert Precision(param="bfloat16", master="bfloat16").master == "bfloat16"
    assert Precision() == Precision(param=None, reduce=None, master=None)


def test_the_digest_is_of_what_the_plan_does():
    reworded = FULL.replace(units=(Unit(paths=("embed",), why="big", num_params=1), *FULL.units[1:]))
    assert reworded.digest() == FULL.digest()
    assert FULL.replace(prefetch=1).digest() != FULL.digest()
    assert FULL.replace(units=FULL.units[1:]).digest() != FULL.digest()


def test_text_names_every_unit():
    text = str(FULL)
    for word in ("embed", "layers.0, layers.1", "norm, head", "(root)", "reshard=2", "bfloat16", "12"):
        assert word in text


BAD = [
    (lambda: Plan(units=()), "SF301"),
    (lambda: Plan(units=(Unit(paths=("layers.0",)),)), "SF301"),
    (lambda: Plan(units=(Unit(paths=("a",)), Unit(paths=("a.b",)), Unit(paths=("",)))), "SF303"),
    (lambda: Plan(units=(Unit(paths=("",)), Unit(paths=("a",)), Unit(paths=("",)))), "SF3"),
    (lambda: Plan(units=(Unit(paths=("a",)), Unit(paths=("a",)), Unit(paths=("",)))), "SF319"),
    (lambda: Unit(paths=()), "at least one module path"),
    (lambda: FULL.replace(checkpointing="some"), "checkpointing"),
    (lambda: FULL.replace(prefetch=-1), "prefetch"),
    (lambda: Precision(param="int8"), "int8"),
    (lambda: MeshShape(replicate=0), "replicate"),
    (lambda: MeshShape(shard=True), "shard"),
    (lambda: MeshShape(replicate=3).resolve(4), "SF104"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_what_is_no_plan(make, message):
    with pytest.raises(ShardfitError, match=message):
        make()


def edited(**changes):
    return json.dumps({**FULL.to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't be read"),
        ("[]", "is a table"),
        ("{}", "list of units"),
        (edited(version=99), "another version"),
        (edited(speed=1), "unknown field.*\n.*speed"),
        (edited(units=[{"path": "a"}]), r"units\[0\].*path"),
        (edited(units=[{}]), r"units\[0\]"),
        (edited(units=[3]), r"units\[0\]"),
        (edited(units=[{"paths": "layers"}]), "paths"),
        (edited(units=[{"paths": [1]}, {"paths": [""]}]), "paths"),
        (edited(offload="yes"), "offload"),
        (edited(prefetch="1"), "prefetch"),
        (edited(mesh={"shard": "4"}), "shard"),
        (edited(mesh=[]), "mesh"),
        (edited(precision={"param": 16}), "param"),
        (edited(methods=["encode", 3]), "methods"),
        (edited(checkpointing=["full"]), "checkpointing"),
    ],
)
def test_files_that_are_no_plan(tmp_path, text, message):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ShardfitError, match=message):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ShardfitError, match="can't be read"):
        Plan.load(tmp_path / "absent.json")


def test_plans_need_no_torch():
    code = "import sys; from shardfit import Plan, Unit; Plan(units=(Unit(paths=('',)),)).digest(); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
