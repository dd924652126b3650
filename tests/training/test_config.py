import pytest

from segcal.errors import ConfigError
from segcal.training import LossSpec, load_config, parse_config
from segcal.training.config import build_loss

LEAST = {"data": "d", "output": "o"}


def test_the_defaults_are_the_papers():
    config = parse_config(LEAST)
    assert (config.batch, config.epochs, config.width, config.depth) == (16, 100, 64, 5)
    assert [config.learning_rate_at(epoch) for epoch in (1, 50, 51, 100)] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", []),
        ("data", 3),
        ("output", ""),
        ("split", {"train": 0.9, "test": 0.2}),
        ("split", {"training": 0.9}),
        ("classes", 1),
        ("network", "vnet"),
        ("width", 0),
        ("depth", 9),
        ("norm", "group"),
        ("dims", 4),
        ("loss", 3),
        ("loss", []),
        ("loss", [{"factor": 1.0}]),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("milestones", [0]),
        ("factor", "0.1"),
        ("batch", 2.0),
        ("epochs", True),
        ("seed", -1),
        ("amp", 1),
        ("workers", -1),
        ("augment", ["noise"]),
        ("crop", [8]),
        ("layers", [0]),
        ("background", "yes"),
        ("logits", "float64"),
    ],
)
def test_every_key_is_checked(key, value):
    with pytest.raises(ConfigError, match=rf"{key} = .*expected"):
        parse_config({**LEAST, key: value})


def test_keys_that_need_each_other():
    with pytest.raises(ConfigError, match=r"'scale', and no crop; expected crop"):
        parse_config({**LEAST, "augment": ["scale"]})
    with pytest.raises(ConfigError, match=r"dims = 3; expected dims = 2"):
        parse_config({**LEAST, "network": "fc-densenet", "dims": 3})


def test_misspelt_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'learnin_rate'.*did you mean 'learning_rate'"):
        parse_config({**LEAST, "learnin_rate": 1e-3})
    with pytest.raises(ConfigError, match=r"unknown loss 'nackl'.*did you mean 'nacl'"):
        parse_config({**LEAST, "loss": "nackl"})
    with pytest.raises(ConfigError, match=r"unknown option 'wieght' of loss 'nacl'.*did you mean 'weight'"):
        build_loss((LossSpec("nacl", options={"wieght": 1}),), 3, 255)
    with pytest.raises(ConfigError, match="unknown option 'ignore_index'"):
        build_loss((LossSpec("ce", options={"ignore_index": 0}),), 3, 255)
    with pytest.raises(ConfigError, match="no key 'output'"):
        parse_config({"data": "d"})


def test_a_file_with_several_losses(tmp_path):
    (tmp_path / "run.toml").write_text(
        """
        data = ["a", "/b"]
        output = "out"
        [split]
        train = 0.8
        validation = 0.2
        [[loss]]
        id = "dice"
        factor = 0.5
        [[loss]]
        id = "crac"
        options = { margin = 5.0, base = "none" }
        """
    )
    config = load_config(tmp_path / "run.toml")
    assert config.data == (str(tmp_path / "a"), "/b")
    assert config.output == str(tmp_path / "out")
    loss = build_loss(config.loss, 4, 11)
    assert loss.weights == [0.5, 1.0]
    assert [type(part).__name__ for part in loss.losses] == ["Dice", "CRaC"]
    assert loss.losses[1].base is None
    assert loss.losses[1].multipliers.values.shape == (2, 4)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "bad.toml").write_text("data =")
    for name in ("bad.toml", "none.toml"):
        with pytest.raises(ConfigError, match=f"{name}.*cannot be read"):
            load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("network", "given", "says"),
    [
        ("fc-densenet", {"norm": "none"}, "norm with network = 'fc-densenet'; expected only width, layers"),
        ("efficientnet-unet", {"depth": 3, "layers": [2]}, "depth, layers with network"),
        ("unet", {"layers": [2]}, "layers with network"),
    ],
)
def test_a_key_that_the_network_does_not_have_is_refused(network, given, says):
    with pytest.raises(ConfigError, match=says):
        parse_config({"data": "d", "output": "o", "network": network, **given})
