"""nnU-Net from raw volumes to calibrated NIfTI probabilities, with the hippocampus data of the Medical Decathlon.

    python recipes/nnunet/hippocampus.py hippocampus/ study/

``hippocampus/`` has ``images/`` and ``labels/`` with files of the same names. The training is a short one of a small
network, for a CPU; everything else is what nnU-Net's commands do. A full training is ``nnUNetv2_train 4 2d FOLD --npz``
for each fold. The same command again goes on where it was stopped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

NAME = "Dataset004_Hippocampus"
LABELS = {"background": 0, "anterior": 1, "posterior": 2}
PLANS = "nnUNetPlansSmall"
SETTINGS = {
    "train": 24,
    "test": 16,
    "folds": 3,
    "epochs": 24,
    "iterations": 50,
    "batch": 8,
    "features": 16,
    "rate": 0.02,
}


def write_raw(data: Path, raw: Path, train: int, test: int) -> None:
    """Copy volumes into nnU-Net's layout; those of the test have labels, too."""
    files = sorted((data / "images").glob("*.nii.gz"))[: train + test]
    for part, own in (("Tr", files[:train]), ("Ts", files[train:])):
        for kind in ("images", "labels"):
            (raw / f"{kind}{part}").mkdir(parents=True, exist_ok=True)
        for file in own:
            case = file.name.removesuffix(".nii.gz")
            shutil.copyfile(file, raw / f"images{part}" / f"{case}_0000.nii.gz")
            shutil.copyfile(data / "labels" / file.name, raw / f"labels{part}" / file.name)
    about = {"channel_names": {"0": "MRI"}, "labels": LABELS, "numTraining": train, "file_ending": ".nii.gz"}
    (raw / "dataset.json").write_text(json.dumps(about))


def take_small_steps(preprocessed: Path, batch: int, features: int) -> None:
    """Derive a plan for a CPU from nnU-Net's own: fewer slices in each step, and fewer features in each stage."""
    plans = json.loads((preprocessed / "nnUNetPlans.json").read_text()) | {"plans_name": PLANS}
    own = plans["configurations"]["2d"]
    own["batch_size"] = batch
    kwargs = own["architecture"]["arch_kwargs"]
    kwargs["features_per_stage"] = [features * 2**stage for stage in range(kwargs["n_stages"])]
    (preprocessed / f"{PLANS}.json").write_text(json.dumps(plans))


def train(fold: int, epochs: int, iterations: int, rate: float) -> None:
    """Train one fold with nnU-Net's own trainer and validate it; goes on where an earlier run stopped."""
    import numpy as np
    import torch
    from nnunetv2.run.run_training import get_trainer_from_args, maybe_load_checkpoint

    # Augmentation in the process that trains: slices of this size are made in no time, and a seed gives the same ones.
    os.environ.update(nnUNet_n_proc_DA="0")
    torch.set_num_threads(1)
    np.random.seed(fold)
    torch.manual_seed(fold)
    cpu = torch.device("cpu")
    trainer = get_trainer_from_args(NAME, "2d", fold, plans_identifier=PLANS, continue_training=True, device=cpu)
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.initial_lr = epochs, iterations, rate
    trainer.num_val_iterations_per_epoch, trainer.save_every = 4, 1
    maybe_load_checkpoint(trainer, continue_training=True, validation_only=False)
    trainer.run_training()
    trainer.perform_actual_validation(save_probabilities=True)


def run(*command: object) -> None:
    """Run a command of nnU-Net or segcal, installed beside this Python."""
    print("$", *command, flush=True)
    name, *arguments = map(str, command)
    subprocess.run([str(Path(sys.executable).with_name(name)), *arguments], check=True)


def summary(model: Path, fold: int) -> Path:
    """What nnU-Net writes last when a fold is trained and validated."""
    return model / f"fold_{fold}" / "validation" / "summary.json"


def resumes(study: Path, settings: dict[str, object]) -> None:
    """Refuse to go on with other settings than those of the files in the folder."""
    file = study / "settings.json"
    study.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(settings))
    elif json.loads(file.read_text()) != settings:
        sys.exit(f"{study} was made with other settings, which are in {file.name}: choose another folder")


def main() -> None:
    """The recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("study", type=Path)
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="folds that are trained at a time, each in one thread")
    options = parser.parse_args()
    study = options.study.absolute()
    resumes(study, {name: getattr(options, name) for name in SETTINGS})
    for kind in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{kind}"] = str(study / kind)
    os.environ.setdefault("nnUNet_def_n_proc", "2")
    # nnU-Net predicts in as many threads as there are cores, which for slices of this size wait for each other.
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")
    raw, preprocessed = study / "raw" / NAME, study / "preprocessed" / NAME
    # What is written last says that a step is done.
    if not (raw / "dataset.json").exists():
        write_raw(options.data, raw, options.train, options.test)
    if not (preprocessed / f"{PLANS}.json").exists():
        run("nnUNetv2_plan_and_preprocess", "-d", 4, "-c", "2d", "-np", 2, "--verify_dataset_integrity")
        take_small_steps(preprocessed, options.batch, options.features)
    model = study / "results" / NAME / f"nnUNetTrainer__{PLANS}__2d"
    folds = range(options.folds)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        todo = [fold for fold in folds if not summary(model, fold).exists()]
        for done in [pool.submit(train, fold, options.epochs, options.iterations, options.rate) for fold in todo]:
            done.result()
    for fold in folds:
        dice = json.loads(summary(model, fold).read_text())["foreground_mean"]["Dice"]
        print(f"fold {fold}: mean foreground Dice {dice:.3f} on the volumes that it held out", flush=True)
    predicted, calibrator, calibrated = study / "predicted", study / "cal.safetensors", study / "calibrated"
    predict = ("-i", raw / "imagesTs", "-o", predicted, "-m", model, "-f", *folds, "-npp", 1, "-nps", 1)
    run(
        "nnUNetv2_predict_from_modelfolder", *predict, "--save_probabilities", "--continue_prediction", "-device", "cpu"
    )
    measure = ("segcal", "nnunet", "evaluate", predicted, "--labels", raw / "labelsTs")
    run(*measure)
    # The three commands.
    run("segcal", "nnunet", "fit", model, "-o", calibrator)
    run(*measure, "--calibrator", calibrator)
    run("segcal", "nnunet", "apply", calibrator, predicted, "-o", calibrated, "--nifti", "--resume")
    # nnU-Net's own ensembling reads what was written.
    run("nnUNetv2_ensemble", "-i", calibrated, predicted, "-o", study / "ensembled")


if __name__ == "__main__":
    main()
