"""nnU-Net from raw volumes to calibrated NIfTI probabilities, with the hippocampus data of the Medical Decathlon.

    python recipes/nnunet/hippocampus.py hippocampus/ study/

``hippocampus/`` has ``images/`` and ``labels/`` with files of the same names. The training is a short one, for a CPU;
everything else is what nnU-Net's commands do. A full training is ``nnUNetv2_train 4 2d FOLD --npz`` for each fold.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "Dataset004_Hippocampus"
LABELS = {"background": 0, "anterior": 1, "posterior": 2}


def write_raw(data: Path, raw: Path, train: int, test: int) -> None:
    """Copy volumes into nnU-Net's layout; those of the test have labels, too."""
    files = sorted((data / "images").glob("*.nii.gz"))[: train + test]
    for part, own in (("Tr", files[:train]), ("Ts", files[train:])):
        for kind in ("images", "labels"):
            (raw / NAME / f"{kind}{part}").mkdir(parents=True)
        for file in own:
            case = file.name.removesuffix(".nii.gz")
            shutil.copyfile(file, raw / NAME / f"images{part}" / f"{case}_0000.nii.gz")
            shutil.copyfile(data / "labels" / file.name, raw / NAME / f"labels{part}" / file.name)
    about = {"channel_names": {"0": "MRI"}, "labels": LABELS, "numTraining": train, "file_ending": ".nii.gz"}
    (raw / NAME / "dataset.json").write_text(json.dumps(about))


def take_small_batches(preprocessed: Path, size: int) -> None:
    """Change nnU-Net's plan for a CPU: it would take 366 slices in each step."""
    file = preprocessed / "nnUNetPlans.json"
    plans = json.loads(file.read_text())
    plans["configurations"]["2d"]["batch_size"] = size
    file.write_text(json.dumps(plans))


def train(preprocessed: Path, folds: int, epochs: int, iterations: int) -> Path:
    """Train and validate each fold for a few steps, with nnU-Net's own trainer; returns the folder of the model."""
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    for fold in range(folds):
        plans = json.loads((preprocessed / "nnUNetPlans.json").read_text()) | {"continue_training": False}
        dataset = json.loads((preprocessed / "dataset.json").read_text())
        torch.manual_seed(fold)
        trainer = nnUNetTrainer(plans, "2d", fold, dataset, torch.device("cpu"))
        trainer.num_epochs, trainer.num_iterations_per_epoch = epochs, iterations
        trainer.num_val_iterations_per_epoch = 2
        trainer.run_training()
        trainer.perform_actual_validation(save_probabilities=True)
    return Path(trainer.output_folder_base)


def run(*command: object) -> None:
    """Run a command of nnU-Net or segcal, installed beside this Python."""
    print("$", *command, flush=True)
    name, *arguments = map(str, command)
    subprocess.run([str(Path(sys.executable).with_name(name)), *arguments], check=True)


def main() -> None:
    """The recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("study", type=Path)
    for name, default in {"train": 10, "test": 4, "folds": 5, "epochs": 3, "iterations": 50, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    study = options.study.absolute()
    for kind in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{kind}"] = str(study / kind)
    os.environ.setdefault("nnUNet_n_proc_DA", "2")
    os.environ.setdefault("nnUNet_def_n_proc", "2")
    raw = study / "raw"
    write_raw(options.data, raw, options.train, options.test)
    run("nnUNetv2_plan_and_preprocess", "-d", 4, "-c", "2d", "--verify_dataset_integrity")
    take_small_batches(study / "preprocessed" / NAME, options.batch)
    model = train(study / "preprocessed" / NAME, options.folds, options.epochs, options.iterations)
    predicted, calibrator, calibrated = study / "predicted", study / "cal.safetensors", study / "calibrated"
    images, labels = raw / NAME / "imagesTs", raw / NAME / "labelsTs"
    every = list(range(options.folds))
    predict = ("-i", images, "-o", predicted, "-m", model, "-f", *every, "--save_probabilities", "-device", "cpu")
    run("nnUNetv2_predict_from_modelfolder", *predict)
    # The three commands.
    run("segcal", "nnunet", "fit", model, "-o", calibrator)
    run("segcal", "nnunet", "evaluate", predicted, "--labels", labels, "--calibrator", calibrator)
    run("segcal", "nnunet", "apply", calibrator, predicted, "-o", calibrated, "--nifti")
    # nnU-Net's own ensembling reads what was written.
    run("nnUNetv2_ensemble", "-i", calibrated, predicted, "-o", study / "ensembled")


if __name__ == "__main__":
    main()
