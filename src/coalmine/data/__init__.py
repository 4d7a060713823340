"""The data sets of the tasks: a catalogue, their folders, and downloads. Needs no torch."""

from coalmine.data.catalogue import DATASETS, Dataset, Download
from coalmine.data.fetch import Fetched, fetch
from coalmine.data.folders import cache_folder, data_folder

__all__ = ["DATASETS", "Dataset", "Download", "Fetched", "cache_folder", "data_folder", "fetch"]
