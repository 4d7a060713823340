"""Small files in TensorFlow Federated's format."""

from pathlib import Path


def tff_hdf5(path: Path, clients: dict[str, dict]) -> None:
    """clients[client][feature] is an array, or a list of bytes."""
    import h5py

    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, values in features.items():
                kind = h5py.string_dtype() if isinstance(values, list) else None
                file.create_dataset(f"examples/{client}/{name}", data=values, dtype=kind)
