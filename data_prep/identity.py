"""Whether a text that is to be written, such as a structure's name or an id, holds a word of a patient's name or id."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

SHORTEST = 3  # letters or digits of a word that is looked for; 2 where they are not of the Latin alphabet
# Words of anatomy and planning: they name nobody, though short names may lie inside them ("lee" in "spleen")
ANATOMY = (
    "abdomen|abdominal|accumbens|adenoma|adrenal|ampulla|amygdala|anal|aneurysm|annulus|anterior|anterolateral|anus|aorta|"
    "aortic|appendix|area|arteries|artery|ascending|atrial|atrium|axilla|background|bile|biliary|bladder|blood|bowel|"
    "brachial|brain|brainstem|breast|bronchi|bronchus|caecum|calcification|canal|cancer|carcinoma|cardiac|carina|carotid|"
    "cartilage|caudal|caudate|cava|cavity|cecum|central|cerebellum|cerebral|cerebrum|cervical|chest|chiasm|cingulate|"
    "clavicle|clinical|cochlea|colon|contour|cornea|coronal|coronary|cortex|costal|cranial|ctv|cyst|descending|diaphragm|"
    "disc|distal|duct|duodenum|edema|enhancing|esophagus|external|eye|femoral|femur|fluid|fossa|frontal|gallbladder|"
    "ganglia|gland|glioma|glottis|gtv|heart|hematoma|hemisphere|hemorrhage|hepatic|hilum|hip|hippocampus|humerus|iliac|"
    "ilium|implant|inferior|insula|internal|intestine|ischemia|ischium|itv|jejunum|joint|kidney|lacrimal|lamina|larynx|"
    "lateral|left|lesion|ligament|limb|liver|lobe|lower|lumbar|lung|lymph|lymphatic|mandible|margin|marrow|mask|matter|"
    "maxilla|medial|median|mediastinum|membrane|meniscus|mesentery|metastases|metastasis|metastatic|muscle|myocardium|"
    "nasal|neck|necrosis|nerve|node|nodes|nodule|nucleus|oar|occipital|oesophagus|omentum|optic|oral|orbit|organ|ovary|"
    "pallidum|pancreas|pancreatic|pancreatitis|parenchyma|parietal|parotid|patella|pelvic|pelvis|penis|pericardium|"
    "peripheral|pharynx|pituitary|planning|plaque|pleura|portal|posterior|primary|prostate|proximal|ptv|pubis|pulmonary|"
    "putamen|rectal|rectum|region|renal|retina|rib|right|roi|sacral|sacrum|sagittal|scapula|sclera|segment|seminal|septum|"
    "sigmoid|skin|skull|spinal|spine|spleen|splenic|stenosis|sternum|stomach|structure|subclavian|submandibular|superior|"
    "suprarenal|target|temporal|tendon|testis|thalami|thalamus|thoracic|thorax|thrombus|thymus|thyroid|tibia|tissue|tongue|"
    "tonsil|trachea|transition|transverse|tumor|tumour|upper|ureter|urethra|urinary|uterus|vagina|valve|vein|vena|"
    "ventricle|ventricular|vertebra|vertebrae|vesicle|vessel|vessels|vitreous|volume|zone|hcc|gbm|nsclc|pdac"
)
ANATOMICAL = frozenset(ANATOMY.split("|"))
NOBODY = frozenset(  # words in names and ids of files that were made anonymous before
    [
        "anon",
        "anonym",
        "anonymous",
        "anonymized",
        "anonymised",
        "anonymisiert",
        "case",
        "none",
        "noname",
        "pat",
        "patient",
    ]
    + ["phantom", "pid", "sub", "subj", "subject", "study", "test", "unknown", "unbekannt"]
)
KNOWN = re.compile("|".join(sorted(ANATOMICAL, key=len, reverse=True)))
TWO_LETTERS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "å": "aa", "ø": "oe", "æ": "ae"})


def words_of(person: Iterable[str]) -> frozenset[str]:
    """Words to look for, of names and ids as headers have them: 'Mustermann^Erika', '4711-Secret'."""
    found: set[str] = set()
    for text in person:
        for part in re.split(r"[\W_]+", text):
            for spelled in _spellings(part):
                runs = [r for r in re.findall(r"\d+|[^\W\d_]+", spelled) if len(r) > SHORTEST]  # the name in 'Miller62'
                found |= {w for w in (spelled, *runs) if len(w) >= (SHORTEST if w.isascii() else 2)}
    return frozenset(found - NOBODY - ANATOMICAL)


def telling(text: str, words: frozenset[str]) -> bool:
    """Whether ``text`` holds one of ``words``, whatever stands between and around its letters.

    A word that lies within one of `ANATOMY` does not count: the liver is no Liv. Words that are family names as well (gross,
    wall, small) are not in that list.
    """
    for spelled in _spellings(text):
        letters = re.sub(r"[\W_]+", "", spelled)
        known = [found.span() for found in KNOWN.finditer(letters)]
        for word in words:
            first = letters.find(word)
            while first >= 0:
                if not any(a <= first and first + len(word) <= b for a, b in known):
                    return True
                first = letters.find(word, first + 1)
    return False


def _spellings(text: str) -> set[str]:
    """Lower case without accents, and with umlauts as two letters."""
    lower = unicodedata.normalize("NFKC", text).casefold()
    return {
        "".join(c for c in unicodedata.normalize("NFKD", spelled) if not unicodedata.combining(c))
        for spelled in (lower, lower.translate(TWO_LETTERS))
    }
