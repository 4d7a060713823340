"""Canaries drawn independently and uniformly from the sphere, the paper's own (Section 3)."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import philox
from coalmine.canaries.array_types import Array, cores, euclidean_norm, is_tensor
from coalmine.canaries.base import Canaries, usable

if TYPE_CHECKING:
    import torch

_CHUNK = 2**15  # normals drawn at a time on a CPU: a few such arrays fit a core's cache
_TORCH_CHUNK = 2**22


class SphereCanaries(Canaries):
    """`count` independent uniform unit vectors (Section 3, Algorithm 1), recreated in chunks, never stored as a whole.

    Every call of `cosines` draws count · dim normal numbers. `RotatedCanaries` give as many cosines for the cost of
    one.

        >>> canaries = SphereCanaries(3, 1000, seed=7)
        >>> canaries.cosines(canaries.canary(1)).round(3)
        array([0.003, 1.   , 0.011])
    """

    def _sum(self, indices: list[int], like: "Array | torch.Tensor") -> "Array | torch.Tensor":
        if is_tensor(like) and like.device.type != "cpu":
            return self._sum_torch(indices, like.device)
        total = np.zeros(self.dim)
        direction = np.empty(self.dim)
        for index in indices:
            for start in range(0, self.dim, _CHUNK):
                direction[start : start + _CHUNK] = self._normals(index, start)
            total += direction / euclidean_norm(direction)
        return total

    def _cosines(self, vector: Any) -> tuple[Any, float]:
        if is_tensor(vector):
            if vector.device.type != "cpu":
                return self._cosines_torch(vector)
            import torch

            cosines, norm = self._cosines(vector.numpy())
            return torch.from_numpy(cosines), norm
        norm = euclidean_norm(vector)
        if not usable(norm):
            return vector[:0], norm
        with ThreadPoolExecutor(cores()) as pool:
            products = list(pool.map(lambda index: self._product(index, vector), range(self.count)))
        return np.array(products) / norm, norm

    def _product(self, index: int, vector: Array) -> float:
        product = squares = 0.0
        for start in range(0, self.dim, _CHUNK):
            direction = self._normals(index, start)
            # einsum, not dot: BLAS would start its own threads in each of ours
            product += float(np.einsum("i,i->", direction, vector[start : start + _CHUNK]))
            squares += float(np.einsum("i,i->", direction, direction))
        return float(product / np.sqrt(squares))

    def _normals(self, index: int, start: int) -> Floats:
        size = min(_CHUNK, self.dim - start)
        bits = philox.words(
            self._key, domain=philox.SPHERE, dim=self.dim, index=index, start=start, count=size + size % 2
        )
        return philox.normals(bits)[:size]

    def _sum_torch(self, indices: list[int], device: "torch.device") -> "torch.Tensor":
        import torch

        total = torch.zeros(self.dim, dtype=torch.float64, device=device)
        for index in indices:
            chunks = [self._torch_normals(index, start, device) for start in range(0, self.dim, _TORCH_CHUNK)]
            direction = torch.cat(chunks)
            total += direction / torch.linalg.vector_norm(direction)
        return total

    def _cosines_torch(self, vector: "torch.Tensor") -> tuple["torch.Tensor", float]:
        import torch

        sums = torch.zeros(self.count, 2, dtype=torch.float64, device=vector.device)
        for index in range(self.count):
            for start in range(0, self.dim, _TORCH_CHUNK):
                direction = self._torch_normals(index, start, vector.device)
                piece = vector[start : start + _TORCH_CHUNK].double()
                sums[index] += torch.stack((direction @ piece, direction @ direction))
        norm = torch.linalg.vector_norm(vector, dtype=torch.float64)
        return sums[:, 0] / sums[:, 1].sqrt() / norm, float(norm)

    def _torch_normals(self, index: int, start: int, device: "torch.device") -> "torch.Tensor":
        size = min(_TORCH_CHUNK, self.dim - start)
        bits = philox.torch_words(
            self._key,
            domain=philox.SPHERE,
            dim=self.dim,
            index=index,
            start=start,
            count=size + size % 2,
            device=device,
        )
        return philox.torch_normals(bits)[:size]
