"""A study made by the real nnU-Net from tiny volumes: planned, preprocessed, trained, validated and predicted.

``python nnunet_study.py FOLDER`` takes some seconds. Nothing of nnU-Net is replaced, but its pools of processes are
pools of threads, because every process would import PyTorch first.
"""

import json
import multiprocessing
import os
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np

SHAPE = (24, 20, 22)  # x, y, z
AFFINE = np.array([[-1.0, 0, 0, 10], [0, 1.0, 0, -7], [0, 0, 1.5, 3], [0, 0, 0, 1]])
ORGANS = {"background": 0, "organ": 1, "lesion": 2}
# The order of the channels, which is not that of the label values, and a label that is ignored.
REGIONS = {"background": 0, "lesion": [2], "whole": [1, 2], "ignore": 3}
FOLDS = (("case_0", "case_1"), ("case_2", "case_3"))
# In place of a context of processes.
THREADS = SimpleNamespace(Pool=ThreadPool)
TRAINED = {"Dataset001_Organs": ("2d", "3d_fullres"), "Dataset002_Regions": ("2d",)}


def volume(seed, ignored=False):
    """An image with two nested blobs, zero near its border, which nnU-Net crops away; and its labels."""
    rng = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    distance = np.linalg.norm(places - (np.array(SHAPE) / 2 + rng.uniform(-2, 2, 3)), axis=-1)
    labels = (distance < 7).astype(np.uint8) + (distance < 4)
    image = labels + rng.normal(0, 0.7, SHAPE) + 3
    inside = np.zeros(SHAPE, bool)
    inside[2:-2, 2:-3, 3:-2] = True
    if ignored:
        labels[: SHAPE[0] // 3] = 3
    return np.where(inside, image, 0).astype(np.float32), labels


def write_raw(root, name, labels):
    """The raw dataset: four training cases and two others, which have labels, too."""
    for part, cases in (("Tr", sum(FOLDS, ())), ("Ts", ("new_0", "new_1"))):
        for kind in ("images", "labels"):
            (root / name / f"{kind}{part}").mkdir(parents=True)
        for seed, case in enumerate(cases, start=10 * len(cases)):
            image, truth = volume(seed, "ignore" in labels)
            nibabel.Nifti1Image(image, AFFINE).to_filename(root / name / f"images{part}" / f"{case}_0000.nii.gz")
            nibabel.Nifti1Image(truth, AFFINE).to_filename(root / name / f"labels{part}" / f"{case}.nii.gz")
    described = {"channel_names": {"0": "MRI"}, "labels": labels, "numTraining": 4, "file_ending": ".nii.gz"}
    if "whole" in labels:
        described["regions_class_order"] = [2, 1]
    (root / name / "dataset.json").write_text(json.dumps(described))


def environment(folder):
    """nnU-Net's variables: its folders, and no processes beside this one."""
    folders = {f"nnUNet_{kind}": str(folder / kind) for kind in ("raw", "preprocessed", "results")}
    return {**folders, "nnUNet_n_proc_DA": "0", "nnUNet_def_n_proc": "1", "nnUNet_compile": "f"}


def trainer(folder, name, configuration, fold, cls=None):
    """A trainer of nnU-Net that stops after very few steps."""
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    plans, dataset = (
        json.loads((folder / "preprocessed" / name / f"{file}.json").read_text()) for file in ("nnUNetPlans", "dataset")
    )
    plans["continue_training"] = False  # what nnU-Net's own command adds
    torch.manual_seed(fold)
    np.random.seed(fold)
    made = (cls or nnUNetTrainer)(plans, configuration, fold, dataset, torch.device("cpu"))
    made.num_epochs, made.num_iterations_per_epoch, made.num_val_iterations_per_epoch = 1, 12, 1
    return made


def shrink(plans):
    """Fewer features and small batches: a network for a CPU."""
    for configuration in plans["configurations"].values():
        if "architecture" in configuration:
            kwargs = configuration["architecture"]["arch_kwargs"]
            kwargs["features_per_stage"] = [min(4 * 2**k, 16) for k in range(len(kwargs["features_per_stage"]))]
            configuration["batch_size"] = 4


def build(folder):
    """Write ``raw/``, ``preprocessed/``, ``results/``, and predictions of new cases in ``predicted-2d/``, ..."""
    os.environ.update(environment(folder))
    multiprocessing.get_context = lambda *_: THREADS
    import torch
    from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    torch.set_num_threads(1)
    for number, (name, configurations) in enumerate(TRAINED.items(), start=1):
        write_raw(folder / "raw", name, ORGANS if number == 1 else REGIONS)
        os.environ.update(nnUNet_n_proc_DA="1")  # the planner needs one
        extract_fingerprints([number], num_processes=1, check_dataset_integrity=True)
        plan_experiments([number])
        preprocessed = folder / "preprocessed" / name
        plans = json.loads((preprocessed / "nnUNetPlans.json").read_text())
        shrink(plans)
        (preprocessed / "nnUNetPlans.json").write_text(json.dumps(plans))
        preprocess([number], configurations=configurations, num_processes=[1] * len(configurations))
        os.environ.update(nnUNet_n_proc_DA="0")
        every = sum(FOLDS, ())
        splits = [{"train": [case for case in every if case not in own], "val": list(own)} for own in FOLDS]
        (preprocessed / "splits_final.json").write_text(json.dumps(splits))
        for configuration in configurations:
            for fold in range(len(FOLDS)):
                own = trainer(folder, name, configuration, fold)
                own.run_training()
                own.perform_actual_validation(save_probabilities=True)
            predictor = nnUNetPredictor(device=torch.device("cpu"), use_mirroring=False, allow_tqdm=False)
            predictor.initialize_from_trained_model_folder(own.output_folder_base, (0, 1))
            images = str(folder / "raw" / name / "imagesTs")
            predicted = folder / f"predicted-{number}-{configuration}"
            predicted.mkdir()
            predictor.predict_from_files_sequential(images, str(predicted), save_probabilities=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
