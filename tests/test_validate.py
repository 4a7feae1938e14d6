import re

import pytest

from segspeed.cli import config_folder, key_table, prepare_arguments
from segspeed.config import Config
from segspeed.validate import SUPPLIED, SettingsError, check_targets, keys, nearest_key, unknown_key


def problems(call, *arguments):
    with pytest.raises(SettingsError) as error:
        call(*arguments)
    return error.value.problems


def test_the_defaults_are_valid_and_say_what_they_are(settings):
    cfg = settings()
    assert cfg.train.budget == 120
    assert cfg.data.target == "data_prep.phantoms.phantoms"
    check_targets(cfg)


def test_every_choice_of_every_group_is_valid(settings):
    for group in ("augment", "data", "debug", "experiment", "loader", "loss", "model", "optimizer"):
        for path in sorted((config_folder() / group).glob("*.yaml")):
            extra = ["data.root=x"] if group == "data" and path.stem not in ("phantoms", "pairs") else []
            extra += ["data.out=y"] if path.stem == "dicom" else []
            extra += ["init.run=x"] if path.stem == "finetune" else []
            check_targets(settings(f"{group}={path.stem}", *extra))
            head = path.read_text().splitlines()
            assert any(line.startswith("#   python -m segspeed.train") for line in head), f"{path} shows no command"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.stepz=3", "train.steps"),
        ("+train.stepz=3", "train.steps"),
        ("++train.stepz=3", "train.steps"),
        ("checkpointing=all", "memory.checkpointing"),
        ("accumulate=4", "train.accumulate"),
        ("checkpoint.every=5min", "save.every"),
        ("phantoms.kind=mr", "data.kind"),
        ("lr=1e-3", "optimizer.lr"),
        ("fold=1", "data.fold"),
        ("steps=10", "train.steps"),
        ("batch_size=2", "plan.batch"),
        ("precison=bf16", "precision"),
        ("trian.steps=3", "train.steps"),
        ("agument=none", "augment"),
    ],
)
def test_unknown_keys_get_the_nearest_name(override, hint):
    (text,) = problems(prepare_arguments, [override])
    assert "unknown" in text
    assert hint in text.split("did you mean")[1]


def test_all_wrong_keys_come_at_once():
    assert len(problems(prepare_arguments, ["foo=1", "+bar.baz=2", "train.stepz=3"])) == 3


def test_a_plus_does_no_harm_to_a_known_key():
    assert prepare_arguments(["+train.steps=3"]) == ["train.steps=3", "train.budget=null"]
    assert prepare_arguments(["++train.steps=3"]) == ["train.steps=3", "train.budget=null"]


def test_arguments_of_a_component_need_no_plus():
    assert prepare_arguments(["model.act=relu"]) == ["++model.act=relu"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["train.steps=3"], ["train.budget=null"]),
        (["train.budget=10min"], ["train.steps=null"]),
        (["train.steps=3", "train.budget=null"], []),
        (["train.steps=null", "train.budget=1h"], []),
        (["seed=1"], []),
    ],
)
def test_the_length_given_replaces_the_other(given, added):
    assert prepare_arguments(given) == [*given, *added]


def test_both_lengths_are_refused(settings):
    (text,) = problems(settings, "train.steps=3", "train.budget=1min")
    assert "either train.steps=N or train.budget" in text


@pytest.mark.parametrize("path", ["/a b(1)/ü", "/x=y", "/a[1]", "/it's", 'say "hi"', "/a#b", "C:\\x(y)"])
def test_a_value_that_hydra_cannot_read_is_shown_as_it_can(path, settings):
    import shlex

    (text,) = problems(prepare_arguments, [f"data.root={path}"])
    (working,) = shlex.split(text.split("quotes: ")[1])
    assert settings("data=msd", working).data.kwargs["root"] == path


def test_a_comma_is_a_sweep_and_says_so():
    (text,) = problems(prepare_arguments, ["data.root=/a,b"])
    assert "sweep" in text
    assert "'data.root=\"/a,b\"'" in text
    assert prepare_arguments(["--multirun", "data.fold=0,1"]) == ["--multirun", "data.fold=0,1"]


@pytest.mark.parametrize("override", ["data=null", "data={a:1}", "model=3", "augment=[a]"])
def test_a_group_takes_the_name_of_a_choice(override):
    (text,) = problems(prepare_arguments, [override])
    assert "name one of the choices" in text
    assert prepare_arguments(["experiment=null"]) == ["experiment=null"]


def test_a_word_that_is_no_setting():
    (text,) = problems(prepare_arguments, ["hippocampus"])
    assert "key=value" in text


def test_missing_values_come_all_at_once_with_other_problems(settings):
    found = problems(settings, "data=msd", "optimizer.lr=???", "precision=bf15")
    assert any("data.root is missing" in p for p in found)
    assert any("optimizer.lr is missing" in p for p in found)
    assert any(re.match(r"precision=bf15: must be 'auto', 'fp32'", p) for p in found)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.steps=0", "train.steps=0: .*greater than or equal to 1"),
        ("train.budget=soon", "train.budget=soon: .*10min"),
        ("loader.workers=-1", "loader.workers=-1: must be 'auto' or .*0"),
        ("loader.foreground=1.5", "loader.foreground=1.5: .*1"),
        ("plan.patch=[1,2]", r"plan.patch=\[1,2\]: .*too few"),
        ("plan.patch=[0,16,16]", "plan.patch.*positive"),
        ("augment.scale.range=[2,1]", "scale.range"),
        ("train.ema=1", "train.ema=1: .*less than 1"),
        ("run.name=a/b", "plain folder name"),
        ("ladder.name=../x", "plain folder name"),
        ("speedrun.name=a/b", "plain folder name"),
        ("sweep.name=../x", "plain folder name"),
        ("plan.features=[0,8]", "plan.features"),
        ("seed=99999999999999999999", "seed"),
        ("device=gpu", "device=gpu"),
        ("compile=perhaps", "compile=perhaps: must be true or false"),
        ("data.folds=1", "data.folds=1: .*2"),
        ("save.every=0s", "save.every"),
    ],
)
def test_values_out_of_range(settings, override, text):
    (found,) = problems(settings, override)
    assert re.search(text, found), found


def test_impossible_combinations(settings):
    assert "0 to 2" in problems(settings, "data.splits=draw", "data.folds=3", "data.fold=3")[0]
    assert "pin_memory" in problems(settings, "device=cpu", "loader.pin_memory=true")[0]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model._target_=monai.networks.nets.DynUNett"], "did you mean monai.networks.nets.DynUNet?"),
        (["model._target_=nowhere.at.all"], "cannot be imported"),
        (["model._target_=monai.networks.nets"], "must be a function or a class"),
        (["model.residuall=true"], "did you mean model.residual?"),
        (["loss.dice=2"], "unknown key loss.dice"),
        (["data.casez=3"], "did you mean data.cases?"),
        (["loader.workrs=2"], "did you mean loader.workers?"),
        (["optimizer._target_=torch.optim.LBFGS"], "unknown key optimizer.weight_decay"),
        (["model._target_=monai.networks.nets.DynUNet"], "needs model.kernel_size, model.strides"),
        (["loss.smooth=abc"], "loss.smooth=abc: must be a number"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: must be a number"),
        (["model.residual=perhaps"], "model.residual=perhaps: must be true or false"),
        (["model.dropout={_target_:no.such.thing}"], "model.dropout._target_=no.such.thing"),
    ],
)
def test_targets_and_their_arguments(settings, overrides, text):
    found = problems(check_targets, settings(*prepare_arguments(overrides)))
    assert any(text in p for p in found), found


def test_supplied_names_are_those_build_hands_over():
    """check_targets must know what build.py supplies, or it would call a sound component incomplete."""
    source = (config_folder().parent / "segspeed" / "build.py").read_text()
    for section in ("loader", "model", "optimizer"):
        call = source.split(f"make(\n        cfg.{section}")[-1] if section != "optimizer" else source
        for name in SUPPLIED[section]:
            assert re.search(rf"\b{name}(=|,)", call), (section, name)


def test_keys_cover_the_yaml_and_the_other_way_round(settings):
    paths = {k.path for k in keys()}
    assert {"train.steps", "memory.checkpointing", "save.every", "data._target_", "augment.scale.range"} <= paths
    assert len(paths) == len(keys())
    assert nearest_key("nothing.like.it") is None
    assert "README" in unknown_key("qqq")


def test_every_key_of_the_schema_stands_in_a_yaml():
    """A key without a line in conf/ could not be given on the command line."""
    from omegaconf import OmegaConf

    def leaves(node, prefix=""):
        for k, v in node.items():
            if isinstance(v, dict) and v:
                yield from leaves(v, f"{prefix}{k}.")
            else:
                yield f"{prefix}{k}"

    folder = config_folder()
    root = OmegaConf.to_container(OmegaConf.load(folder / "train.yaml"))
    root.pop("defaults"), root.pop("hydra")
    found = set(leaves(root))
    for group, choice in (("augment", "light"), ("loader", "torch"), ("model", "dynunet"), ("loss", "dice_ce"),
                          ("optimizer", "adamw"), ("data", "msd"), ("logger", "none"), ("bench", "loader"), ("bench", "memory"),
                          ("bench", "predict"), ("bench", "scale")):  # fmt: skip
        found |= {
            f"{group}.{k}" for k in leaves(OmegaConf.to_container(OmegaConf.load(folder / group / f"{choice}.yaml")))
        }
    assert {k.path for k in keys()} <= found


def test_readme_holds_the_table_of_all_keys():
    readme = (config_folder().parent / "README.md").read_text()
    table = readme.split("<!-- keys -->")[1].split("<!-- end of keys -->")[0].strip()
    assert table == key_table(), "refresh it: python -m segspeed.cli keys"


def test_the_schema_is_frozen_and_strict(settings):
    cfg = settings()
    assert isinstance(cfg, Config)
    with pytest.raises(ValueError, match="frozen"):
        cfg.seed = 3


@pytest.mark.parametrize("name", ["2026_01_02", "1e3", "0x10", "007"])
def test_a_name_of_digits_stays_as_it_was_typed(settings, name):
    assert settings(f"run.name={name}").run.name == name


@pytest.mark.parametrize(
    "override",
    ["seed=true", "threads=true", "plan.batch=true", "train.budget=inf", "data.tolerance_mm=nan", "plan.spacing=[inf,1,1]",
     "augment.scale.range=[0.7,nan]", "data.split_seed=-1", "threads=1000000", "loader.workers=1000000",
     "run.name=" + "a" * 300],
)  # fmt: skip
def test_values_that_no_run_can_have(settings, override):
    key = override.split("=")[0].split(".")[-1]
    assert key in " ".join(problems(settings, override))
