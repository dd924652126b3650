import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from datasets import plain
from segcal.cases import open_cases
from segcal.cases.caseset import CaseRef, CaseSet
from segcal.study.work.store import Store, class_key, content_key, fingerprints
from segcal.synthetic import Temperature, scenes
from segcal.types import Case


def test_fingerprints_follow_the_files(tmp_path):
    root = plain(tmp_path)
    before = fingerprints(open_cases(root))
    assert before == fingerprints(open_cases(root))
    np.save(root / "labels" / "case1.npy", np.zeros((9, 7), np.uint8))
    os.utime(root / "labels" / "case1.npy", ns=(1, 1))
    after = fingerprints(open_cases(root))
    assert [name for name in before if before[name] != after[name]] == ["case1"]
    assert fingerprints(open_cases(root, ignore_index=0)) != after


def test_files_are_not_read_for_a_fingerprint(tmp_path, monkeypatch):
    """Wherever their cases will be."""
    cases = open_cases(plain(tmp_path))
    monkeypatch.setattr(Case, "logits", property(lambda case: pytest.fail(f"{case.id} was read")))
    for device in (None, "cpu"):
        assert len(set(fingerprints(cases.on(device)).values())) == len(cases)


def test_fingerprints_follow_the_generator_and_the_pooling():
    one = fingerprints(scenes(2, size=(32, 40), members=2))
    assert one["image-000"] != one["image-001"]
    assert one != fingerprints(scenes(2, size=(32, 40), members=2, plant=[Temperature(2.0)]))
    assert one != fingerprints(scenes(2, size=(32, 40), members=2).pooled("probs"))


def test_cases_of_unknown_origin_are_known_by_their_content():
    def cases(value):
        scene = scenes(1, size=(32, 40))[0]
        _ = scene.logits
        scene._read["logits"] = scene.logits + torch.tensor(value)
        return CaseSet((CaseRef("a", lambda: scene),), 6)

    assert fingerprints(cases(0.0)) == fingerprints(cases(0.0)) != fingerprints(cases(1.0))
    assert isinstance(cases(0.0)[0], Case)


def test_code_of_the_user_is_known_by_what_it_returns():
    """Its name stays when its body, or the file it reads, changes."""
    found = []
    for factor in (1.0, 2.0, 1.0):
        name = {"Case": Case, "scenes": scenes, "factor": factor}
        exec("def read(path):\n    case = scenes(1, size=(32, 40))[0]\n    case.load()\n    "
             "case._read['logits'] = factor * case.logits\n    return case", name)  # fmt: skip
        found.append(fingerprints(CaseSet((CaseRef("a", partial(name["read"], "a.npy")),), 6)))
    assert found[0] == found[2] != found[1]


def test_which_cases_belong_together_is_part_of_the_key():
    cases = scenes(4, size=(32, 40))
    halves = replace(cases, groups={name: str(index // 2) for index, name in enumerate(cases.ids)})
    renamed = replace(cases, groups={name: f"patient {index // 2}" for index, name in enumerate(cases.ids)})
    assert class_key(cases) != class_key(halves) == class_key(renamed)


def test_a_damaged_entry_is_no_entry(tmp_path):
    store, key = Store(tmp_path), content_key(a=1)
    kept = store.write("fit", key, {"x": [1.0, float("inf")]})
    assert kept == store.read("fit", key) == {"x": [1.0, "inf"]}
    path = next(tmp_path.iterdir())
    path.write_text(path.read_text()[:-3])
    assert store.read("fit", key) is None
    assert store.load(key) is None


@pytest.mark.parametrize("other", [{"a": 2}, {"a": 1, "b": None}, {"a": "1"}])
def test_keys_differ_where_the_content_does(other):
    assert content_key(a=1) != content_key(**other)
