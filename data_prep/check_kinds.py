"""What every kind of problem means and what to do about it, for people who see it for the first time."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """Plain sentences; the message of each problem has the details."""

    title: str
    meaning: str
    action: str


KINDS: dict[str, Kind] = {
    "unreadable": Kind(
        "The file cannot be read",
        "The file is damaged, cut short or no NIfTI file.",
        "Copy it again from its source, or leave the case out.",
    ),
    "missing-file": Kind(
        "An image file is missing", "The file that the data names is not there.", "Add it, or leave the case out."
    ),
    "missing-label": Kind(
        "The label is missing", "Training needs a label map for every case.", "Add it, or leave the case out."
    ),
    "four-dimensional": Kind(
        "More than three axes",
        "The last axis may be channels, time frames or b-values; only you know which.",
        "Write each as a file of its own, or pick one.",
    ),
    "not-3d": Kind("Not a volume", "The file holds a single picture or a row of numbers.", "Leave the case out."),
    "empty-volume": Kind("No voxels", "The header names an axis of length 0.", "Copy the file again from its source."),
    "rgb": Kind(
        "Colour voxels", "Screenshots and secondary captures carry no intensities.", "Take the original series instead."
    ),
    "complex": Kind("Complex voxels", "The file holds raw phase and magnitude.", "Write the magnitude as a volume."),
    "bad-affine": Kind(
        "The header has lost its place in space",
        "The affine holds NaN, a voxel size of zero, or folds two axes into one.",
        "Convert the case again from DICOM.",
    ),
    "nan": Kind(
        "NaN or infinite voxels",
        "One such voxel turns the whole loss into NaN.",
        "Replace them by 0, or by the value of air in CT.",
    ),
    "unknown-label": Kind(
        "Label values without a class",
        "The file holds values that no class declares.",
        "Name the values in the data settings, or mend the label.",
    ),
    "non-integer-label": Kind(
        "Label values that are no whole numbers",
        "A probability map, or a label that was resampled with interpolation.",
        "Threshold it, or resample the original with nearest neighbours.",
    ),
    "shape-mismatch": Kind(
        "Shapes differ",
        "Image and label (or two channels) have different numbers of voxels, so they cannot lie on each other.",
        "Often the label belongs to another series: take the right one, or resample it onto the image.",
    ),
    "affine-mismatch": Kind(
        "Image and label lie in different places",
        "Their headers put the same voxel at different points of the scanner.",
        "Resample one onto the other (data.resample_labels=true does it). The pictures put voxel on voxel: raise "
        "data.tolerance_mm only where they fit in them.",
    ),
    "swapped": Kind(
        "Image and label seem to be swapped",
        "The image file holds nothing but label values, and the label file holds others.",
        "Name each where the other stands.",
    ),
    "image-is-label": Kind(
        "Image and label are the same", "One file was copied over the other.", "Copy the image again from its source."
    ),
    "channel-count": Kind(
        "Another number of channels",
        "The file holds more or fewer channels than the data settings name.",
        "Name every channel, or mend the file.",
    ),
    "shear": Kind(
        "Sheared axes",
        "The axes are not at right angles, as a tilted CT gantry leaves them; distances and angles would be wrong.",
        "Resample the volume onto a straight grid, or accept it with data.accept=[shear].",
    ),
    "duplicate-id": Kind("One id for two cases", "Results could not be told apart.", "Give each case its own id."),
    "split": Kind("The split does not fit the data", "A Dice measured on this fold would not be true.", ""),
    "constant-image": Kind(
        "The image has one value only", "It teaches nothing; often an export that failed.", "Export it again."
    ),
    "empty-label": Kind(
        "The label is empty",
        "No voxel belongs to a class. Right for healthy controls, wrong for a label that was never drawn.",
        "Look at the case; leave it out if the structure is there but not drawn.",
    ),
    "duplicate": Kind(
        "The same image under two ids",
        "The image holds the same voxels. If one copy lands in training and the other in validation, the score is too good.",
        "Leave one of them out, or give both one patient.",
    ),
    "absent-class": Kind(
        "A class that no case has", "It cannot be learnt.", "Check its value in the data settings, or drop it."
    ),
    "odd-spacing": Kind(
        "A voxel size far from the others'",
        "More than ten times off the median: most often metres or micrometres in the header.",
        "Check the header's units.",
    ),
    "no-orientation": Kind(
        "Left and right are not stored",
        "Neither sform nor qform of the header is coded, so the orientation is a guess.",
        "Convert again from DICOM, or compare its picture with a case that you know.",
    ),
    "two-orientations": Kind(
        "Two orientations in one header",
        "qform and sform disagree; programs choose differently. Here the sform counts.",
        "Convert again from DICOM where the picture looks turned.",
    ),
    "not-hu": Kind(
        "A CT that is not in Hounsfield units",
        "It has no air: its slope and intercept were not applied, or it was cut down to tissue.",
        "Convert again from DICOM, with RescaleSlope and RescaleIntercept.",
    ),
    "padding": Kind(
        "A padding value in the image",
        "Voxels far below all others mark where nothing was measured; they disturb mean and deviation.",
        "Replace them by the value of the background.",
    ),
    "squeezed": Kind("Axes of length 1", "They were dropped; nothing is lost.", ""),
    "rounded-label": Kind("Labels stored as decimals", "They are whole numbers but for rounding; nothing is lost.", ""),
    "direction-noise": Kind("Axes off the right angle by rounding", "They are left as they are.", ""),
    "anisotropic": Kind(
        "One axis is much coarser", "Usual for thick slices; the coarse axis is resampled by a rule of its own.", ""
    ),
    "below-air": Kind("Values below air in a CT", "They count as air; nothing is lost.", ""),
    "mapped-values": Kind(
        "Label values that are not 1, 2, 3 ...", "They are renumbered for training and written back as they are.", ""
    ),
    "resampled-label": Kind(
        "Labels brought onto the image's grid",
        "Each class linearly, the largest share wins; because data.resample_labels asks for it.",
        "Look at the picture: do the outlines fit?",
    ),
    "label-elsewhere": Kind(
        "The label lies outside its image",
        "Most of its foreground would be lost: it is likely to belong to another image.",
        "Give the right label, or leave the case out.",
    ),
    "label-without-image": Kind(
        "A label without an image",
        "No image has its name, so nothing is learnt from it.",
        "Add the image, or exclude it.",
    ),
    "maybe-ct": Kind(
        "Values that look like CT",
        "A channel that is not called CT is normalised by each case's own mean, which spoils absolute HU.",
        "Name it: data.channels=[CT].",
    ),
    "maybe-one-patient": Kind(
        "Ids that speak of one patient",
        "Time points of a patient on both sides of the split make the Dice a lie.",
        "A patient column, or data.patient_pattern.",
    ),
    "maybe-one-class": Kind(
        "Two classes that never meet",
        "Two hospitals may have written one structure with two values (1 and 255).",
        "Merge them with data.classes, or data.class_names={organ: [1, 255]}.",
    ),
    "no-picture": Kind("A picture could not be written", "Nothing else depends on it.", "Is the disk full?"),
    "outlier": Kind(
        "Far from the other cases",
        "Often right (a child, a large tumour, another scanner), sometimes a wrong unit, a wrong series or a label of "
        "another patient. The rule stands under the histograms.",
        "Look at the picture of the case.",
    ),
}


def explain(kind: str) -> Kind:
    """The explanation of a kind; one that is not known here is shown by its name, and its messages speak for it."""
    return KINDS.get(kind) or Kind(kind.replace("-", " ").replace("_", " ").capitalize(), "", "")
