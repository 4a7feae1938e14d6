"""What pyproject.toml cannot say: ``conf/`` stands at the top of the checkout and travels in the wheel as data.

Everything else about the package is in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["segspeed*", "data_prep*"]), "segspeed._conf"],
    package_dir={"segspeed._conf": "conf"},
    package_data={"segspeed._conf": ["**/*.yaml"], "segspeed": ["py.typed"]},
)
