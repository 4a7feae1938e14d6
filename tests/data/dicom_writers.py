"""DICOM files written with pydicom alone, so that no library reads back what it wrote itself."""

import numpy as np

NAME = "Mustermann^Erika"
SHAPE = (6, 5, 4)  # slices, rows, columns
IDENTITY = {
    "PatientName": NAME, "PatientID": "4711-Geheim", "PatientBirthDate": "19620101", "PatientSex": "F", "PatientAge": "061Y",
    "OtherPatientIDs": "ZweiteNr77", "PatientAddress": "Lindenallee", "PatientComments": "Kommentar1",
    "InstitutionName": "Klinikum Nord", "InstitutionAddress": "Uferweg", "StationName": "Raum17",
    "InstitutionalDepartmentName": "Radiologie7", "ReferringPhysicianName": "Brinkmann^Kai",
    "PerformingPhysicianName": "Holtz^Eva", "OperatorsName": "Ahlers^Jo", "StudyDate": "20190304", "SeriesDate": "20190305",
    "AcquisitionDate": "20190306", "ContentDate": "20190307", "StudyTime": "091011", "AccessionNumber": "ACC998877",
    "StudyID": "STID5566", "StudyDescription": "Bauchschmerz", "ImageComments": "Bemerkung2", "ProtocolName": "Protokoll9",
    "DeviceSerialNumber": "SN123987", "RequestedProcedureDescription": "Anfrage3",
}  # fmt: skip


def voxels():
    return np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE) + 10


def blank(sop_class, uid=None):
    """A data set with file meta information and what identifies a patient in every usual tag."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = sop_class
    meta.MediaStorageSOPInstanceUID = uid or generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one = Dataset()
    one.file_meta = meta
    one.SOPClassUID, one.SOPInstanceUID = sop_class, meta.MediaStorageSOPInstanceUID
    for keyword, value in IDENTITY.items():
        setattr(one, keyword, value)
    one.add_new(0x00091001, "LO", "Hersteller^PrivatTag")
    one.StudyInstanceUID, one.FrameOfReferenceUID = "1.2.9", "1.2.8"
    return one


def save(one, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    one.save_as(path, enforce_file_format=True)


def write_slice(path, pixels, position, *, uid="1.2.3", orientation=(1, 0, 0, 0, 1, 0), spacing=(0.5, 0.7), number=1,
                slope=2.0, intercept=-1024.0, modality="CT", rle=False, sop=None, **tags):  # fmt: skip
    """One plane. ``tags`` are set last: StudyInstanceUID="1.2.10", SeriesDescription="portal"."""
    from pydicom.uid import CTImageStorage, MRImageStorage, PositronEmissionTomographyImageStorage

    storage = {"CT": CTImageStorage, "MR": MRImageStorage, "PT": PositronEmissionTomographyImageStorage}[modality]
    one = blank(storage, sop)
    one.Modality, one.SeriesInstanceUID, one.InstanceNumber = modality, uid, number
    one.ImagePositionPatient, one.ImageOrientationPatient = [f"{p:.10g}"[:16] for p in position], list(orientation)
    one.PixelSpacing, one.SliceThickness = list(spacing), 2.5
    one.Rows, one.Columns = pixels.shape
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 1
    if slope is not None:
        one.RescaleSlope, one.RescaleIntercept = slope, intercept
    one.PixelData = pixels.astype("<i2").tobytes()
    for keyword, value in tags.items():
        setattr(one, keyword, value)
    if rle:
        one.compress("1.2.840.10008.1.2.5", generate_instance_uid=False)
    save(one, path)
    return one


def write_series(folder, positions=None, order=None, array=None, **more):
    """A series in files whose names are shuffled against the order of its slices."""
    array = voxels() if array is None else array
    positions = positions or [(-10.0, 20.0, 2.5 * z) for z in range(len(array))]
    order = order or (np.arange(len(array)) * 5 + 3) % len(array) if len(array) % 5 else np.arange(len(array))[::-1]
    for name, place in enumerate(order):
        write_slice(folder / f"{name}.dcm", array[place], positions[place], number=int(place), **more)
    return folder


def group(sequence, **values):
    """A functional group: a data set with one sequence of one item."""
    from pydicom.dataset import Dataset

    inner, outer = Dataset(), Dataset()
    for keyword, value in values.items():
        setattr(inner, keyword, value)
    setattr(outer, sequence, [inner])
    return outer


def merged(*groups):
    from pydicom.dataset import Dataset

    one = Dataset()
    for part in groups:
        one.update(part)
    return one


def write_multiframe(path, array, positions, *, uid="1.2.6", spacing=(0.5, 0.7), slopes=None, **tags):
    """An enhanced MR file; the frames in the order of ``array``."""
    from pydicom.uid import EnhancedMRImageStorage

    one = blank(EnhancedMRImageStorage)
    one.Modality, one.SeriesInstanceUID, one.NumberOfFrames = "MR", uid, len(array)
    one.SharedFunctionalGroupsSequence = [
        merged(
            group("PixelMeasuresSequence", PixelSpacing=list(spacing), SliceThickness=2.5),
            group("PlaneOrientationSequence", ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
        )
    ]
    one.PerFrameFunctionalGroupsSequence = [
        merged(
            group("PlanePositionSequence", ImagePositionPatient=list(p)),
            group("PixelValueTransformationSequence", RescaleSlope=s, RescaleIntercept=0, RescaleType="US"),
        )
        for p, s in zip(positions, slopes or [1] * len(array), strict=True)
    ]
    one.Rows, one.Columns = array.shape[1:]
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 1
    one.PixelData = array.astype("<i2").tobytes()
    for keyword, value in tags.items():
        setattr(one, keyword, value)
    save(one, path)


def write_seg(path, masks, positions, *, names, refers="1.2.3", kind="BINARY", spacing=(0.5, 0.7),
              orientation=(1, 0, 0, 0, 1, 0), full=255, reference="1.2.8", **tags):  # fmt: skip
    """A DICOM SEG of ``masks[segment][slice]``; frames without a voxel are left out, as writers do.

    Values are 0 and 1, or 0 to ``full`` of a fractional one.
    """
    from pydicom.dataset import Dataset
    from pydicom.pixels.utils import pack_bits
    from pydicom.uid import SegmentationStorage

    one = blank(SegmentationStorage)
    one.Modality, one.SeriesInstanceUID, one.SegmentationType = "SEG", "1.2.77", kind
    one.FrameOfReferenceUID = reference
    one.SegmentSequence = []
    for number, name in enumerate(names, start=1):
        item = Dataset()
        item.SegmentNumber, item.SegmentLabel, item.SegmentAlgorithmType = number, name, "MANUAL"
        one.SegmentSequence.append(item)
    one.SharedFunctionalGroupsSequence = [
        merged(
            group("PixelMeasuresSequence", PixelSpacing=list(spacing), SliceThickness=2.5),
            group("PlaneOrientationSequence", ImageOrientationPatient=list(orientation)),
        )
    ]
    one.PerFrameFunctionalGroupsSequence, frames = [], []
    for number, volume in enumerate(masks, start=1):
        for position, plane in zip(positions, volume, strict=True):
            if plane.any():
                frames.append(plane)
                one.PerFrameFunctionalGroupsSequence.append(
                    merged(
                        group("SegmentIdentificationSequence", ReferencedSegmentNumber=number),
                        group("PlanePositionSequence", ImagePositionPatient=[f"{p:.10g}"[:16] for p in position]),
                    )
                )
    frames = np.stack(frames)
    one.NumberOfFrames, (one.Rows, one.Columns) = len(frames), frames.shape[1:]
    one.SamplesPerPixel, one.PhotometricInterpretation, one.PixelRepresentation = 1, "MONOCHROME2", 0
    bits = 1 if kind == "BINARY" else 8
    one.BitsAllocated, one.BitsStored, one.HighBit = bits, bits, bits - 1
    if kind == "FRACTIONAL":
        one.SegmentationFractionalType, one.MaximumFractionalValue = "PROBABILITY", full
    data = pack_bits(frames.astype(np.uint8).ravel()) if bits == 1 else frames.astype(np.uint8).tobytes()
    one.PixelData = data + b"\0" * (len(data) % 2)
    if refers is not None:
        item = Dataset()
        item.SeriesInstanceUID = refers
        one.ReferencedSeriesSequence = [item]
    for keyword, value in tags.items():
        setattr(one, keyword, value)
    save(one, path)


def write_rtstruct(path, rois, *, refers="1.2.3", reference="1.2.8", kind="CLOSED_PLANAR", **tags):
    """An RTSTRUCT of ``rois = {name: [points (n, 3) in mm, ...] or None}``; None: a structure without contours."""
    from pydicom.dataset import Dataset
    from pydicom.uid import RTStructureSetStorage

    one = blank(RTStructureSetStorage)
    del one.FrameOfReferenceUID
    one.Modality, one.SeriesInstanceUID = "RTSTRUCT", "1.2.78"
    series, study, frame = Dataset(), Dataset(), Dataset()
    series.SeriesInstanceUID = refers
    study.RTReferencedSeriesSequence = [series]
    frame.FrameOfReferenceUID, frame.RTReferencedStudySequence = reference, [study]
    one.ReferencedFrameOfReferenceSequence = [frame]
    one.StructureSetROISequence, one.ROIContourSequence = [], []
    for number, (name, contours) in enumerate(rois.items(), start=1):
        roi, item = Dataset(), Dataset()
        roi.ROINumber, roi.ROIName = number, name
        item.ReferencedROINumber = number
        if contours is not None:
            item.ContourSequence = []
            for points in contours:
                contour = Dataset()
                contour.ContourGeometricType, contour.NumberOfContourPoints = kind, len(points)
                contour.ContourData = [f"{v:.6f}" for v in np.asarray(points, float).ravel()]
                item.ContourSequence.append(contour)
        one.StructureSetROISequence.append(roi)
        one.ROIContourSequence.append(item)
    for keyword, value in tags.items():
        setattr(one, keyword, value)
    save(one, path)
