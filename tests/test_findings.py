from __future__ import annotations

import json
import math
import pickle

import pytest

from shardfit.errors import EXIT_COULD_NOT_RUN, ShardfitError
from shardfit.findings import Finding, Report, Where
from shardfit.rules import RULES

WHERE = Where(file="train.py", line=3, column=7, module="blocks.0", rank=1, step=4)


def report(*severities, **others):
    findings = tuple(
        Finding(code="SF501", severity=s, message=f"a {s}", where=WHERE, evidence="seen", fix="do")
        for s in severities
    )
    return Report(tool="check", subject="train.py", findings=findings, **others)


@pytest.mark.parametrize(
    ("severities", "completed", "status"),
    [
        ((), True, 0),
        (("note",), True, 0),
        (("warning",), True, 1),
        (("error", "note"), True, 1),
        ((), False, 3),
        (("note",), False, 3),
        (("error",), False, 1),
    ],
)
def test_exit_status(severities, completed, status):
    assert report(*severities, completed=completed).exit_status == status


def test_text_names_place_evidence_fix_and_counts():
    text = report("error", "note", "note", looked_at=("2 files",)).to_text()
    assert "train.py:3:7, module blocks.0, rank 1, step 4: SF501 error: a error\n" in text
    assert "    seen: seen\n    do:   do\n" in text
    assert "check train.py: 1 error, 2 notes\n  2 files" in text
    assert report(looked_at=("nothing",)).to_text() == "check train.py: clean\n  nothing"


def test_a_place_with_zeros_is_told():
    assert str(Where(rank=0, step=0)) == "rank 0, step 0"
    assert str(Where()) == ""


def test_json_comes_back_the_same():
    before = report("error", "note", looked_at=("a", "b"), data={"rows": [{"x": 1.5, "y": None}]})
    text = before.to_json()
    assert Report.from_json(text) == before
    assert json.loads(text)["exit_status"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_numbers_that_json_lacks(value):
    text = report(data={"curve": [1.0, value], "deep": {"x": (value,)}}).to_json()

    def refuse(name):
        raise AssertionError(name)

    raw = json.loads(text, parse_constant=refuse)
    assert raw["data"] == {"curve": [1.0, None], "deep": {"x": [None]}}


def test_sarif_has_the_shape_that_services_read():
    findings = (
        Finding(code="SF601", severity="note", message="m", where=Where(module="head")),
        Finding(code="SF301", severity="error", message="n", where=WHERE, evidence="e", fix="f"),
        Finding(code="SF301", severity="warning", message="o"),
    )
    raw = json.loads(Report(tool="t", subject="s", findings=findings, completed=False).to_sarif())
    assert raw["version"] == "2.1.0"
    (run,) = raw["runs"]
    assert run["invocations"] == [{"executionSuccessful": False}]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["SF301", "SF601"]
    assert rules[0]["name"] == RULES["SF301"].name
    for result, finding in zip(run["results"], findings, strict=True):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == finding.code
        assert result["level"] == finding.severity
    head, placed, nowhere = run["results"]
    assert head["locations"] == [{"logicalLocations": [{"fullyQualifiedName": "head", "kind": "module"}]}]
    physical = placed["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "train.py"}
    assert physical["region"] == {"startLine": 3, "startColumn": 7}
    assert placed["message"]["text"] == "n\ne\nf"
    assert "locations" not in nowhere


def test_a_rule_makes_findings():
    finding = RULES["SF501"].finding(evidence="3 tensors", where=Where(rank=1))
    assert (finding.code, finding.severity) == ("SF501", "error")
    assert finding.message == RULES["SF501"].summary
    assert finding.fix == RULES["SF501"].fix
    assert RULES["SF501"].finding(message="other").message == "other"


def test_an_error_survives_the_way_between_processes():
    error = ShardfitError("w", evidence="e", fix="f", code="SF102", exit_status=EXIT_COULD_NOT_RUN)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "SF102: w\n  seen: e\n  do:   f"
    assert again.exit_status == EXIT_COULD_NOT_RUN
