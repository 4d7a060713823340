"""A site: one small random step, sent as a difference."""

import numpy as np
import nvflare.client as flare


def main() -> None:
    """Train whenever the server asks."""
    flare.init()
    rng = np.random.default_rng()
    while flare.is_running():
        received = flare.receive()
        step = {name: 0.001 * rng.normal(size=np.shape(values)) for name, values in received.params.items()}
        flare.send(flare.FLModel(params=step, params_type=flare.ParamsType.DIFF))


if __name__ == "__main__":
    main()
