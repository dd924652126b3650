"""The documentation: its Python runs, its commands have the options they show, its links lead somewhere."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

import segcal
from segcal.cli.commands import app
from segcal.synthetic import demo_plant, scenes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
# Guides that need other libraries: tests/integrations runs them.
ELSEWHERE = {"docs/deploy.md", "docs/lightning.md", "docs/monai.md", "docs/recipes.md"}
# The page of the trainer has its own settings; these are for seconds instead of hours.
TRAINING = """
data = "study"
output = "runs/nacl"
loss = "nacl"
width = 4
depth = 2
epochs = 1
batch = 4
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(page, *languages):
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def cells(notebook):
    return [
        "".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Small scenes of an overconfident network, as the pages have them in study/ and scenes/."""
    folder = tmp_path_factory.mktemp("docs") / "study"
    cases = scenes(8, size=(16, 24), plant=demo_plant(6))
    segcal.write_dataset(cases, folder)
    return folder


@pytest.fixture
def workplace(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("study", "scenes"):
        (tmp_path / name).symlink_to(study)
    (tmp_path / "nacl.toml").write_text(TRAINING)


def given():
    """What readers bring along: a network and its data."""
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 6, 16, 24), torch.randint(0, 6, (8, 16, 24))
    return {"logits": logits, "labels": labels, "loader": DataLoader(TensorDataset(logits, labels), batch_size=4)}


CODE = {name_of(path): blocks(path, "python") for path in PAGES} | {name_of(path): cells(path) for path in NOTEBOOKS}


@pytest.mark.filterwarnings("ignore:the source can be read only once")
@pytest.mark.parametrize("page", [name for name, code in CODE.items() if code and name not in ELSEWHERE])
def test_python_runs(page, workplace):
    names = {"__name__": "docs", **given()}
    for number, code in enumerate(CODE[page], 1):
        exec(compile(code, f"{page}, block {number}", "exec"), names)


def commands(page):
    """The segcal commands of a page's shell blocks, as lists of words."""
    for block in blocks(page, "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:.* -m )?segcal (.*)", line)
            if found:
                yield shlex.split(found[1], comments=True)


COMMANDS = {name_of(page): found for page in PAGES if (found := list(commands(page)))}


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_and_their_options_exist(page):
    for name, *words in COMMANDS[page]:
        if name.startswith("-"):
            continue
        known = typer.main.get_command(app).commands
        while hasattr(known.get(name), "commands"):  # a group, such as nnunet
            known, (name, *words) = known[name].commands, words
        assert name in known, f"segcal {name}"
        options = {spelling for parameter in known[name].params for spelling in parameter.opts} | {"--help"}
        for word in words:
            assert not re.match(r"--?[a-z]", word) or word in options, f"segcal {name} {word}"


def test_the_first_five_minutes_run(run, workplace):
    """The tutorial on smaller scenes, with ts in place of trust and without the study: both would take long."""
    ran = []
    for name, *words in COMMANDS["docs/start.md"]:
        if name in ("scenes", "compare"):
            continue
        code, _, error = run(name, *["ts" if word == "trust" else word for word in words])
        assert code == 0, f"segcal {name}: {error}"
        ran.append(name)
    assert {"check", "evaluate", "fit", "apply"} <= set(ran)


def anchors(page):
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_public_name_has_an_example():
    registries = {name for name in segcal.__all__ if isinstance(getattr(segcal, name), dict)}
    documented = {name: getattr(segcal, name) for name in set(segcal.__all__) - registries}
    documented |= segcal.CALIBRATORS | segcal.LOSSES
    documented |= {name: spec.function for name, spec in segcal.METRICS.items()}
    documented |= {name: type(region) for name, region in segcal.REGIONS.items()}
    assert not [name for name, thing in documented.items() if ">>>" not in (inspect.getdoc(thing) or "")]


@pytest.mark.parametrize("kind", ["calibrators", "losses", "metrics"])
def test_every_method_has_a_card(kind):
    headings = re.findall(r"^##+ (.*)", (ROOT / f"docs/cards/{kind}.md").read_text(), re.MULTILINE)
    cards = {name for heading in headings for name in re.findall(r"`([\w-]+)`", heading)}
    assert cards == set(getattr(segcal, kind.upper()))
