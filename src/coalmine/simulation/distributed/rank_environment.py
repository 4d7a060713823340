"""Ranks started by torchrun, srun, or a script that sets the same environment variables."""

import errno
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from coalmine.argument_checks import short_repr
from coalmine.measure.torch_group import LostRankError, can_connect
from coalmine.simulation.distributed.rank_group import RankGroup

ARRIVAL = 300.0  # seconds that the first rank waits for the last; COALMINE_RANK_TIMEOUT overrides it
MOST_RANKS = 1_024
FIRST_PORT, PORTS = 20_000, 20_000  # for Slurm jobs without MASTER_PORT


@dataclass(frozen=True)
class RankPlace:
    """The rank of this process, the number of ranks, and the address where they meet."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    agent: bool = False  # whether torchrun's agent process has the store
    attempt: str = "0"


def place_from(environment: Mapping[str, str]) -> RankPlace | None:
    """The place of this process according to torchrun's or Slurm's variables; None without such variables.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun sets SLURM_PROCID, SLURM_STEP_NUM_TASKS,
    SLURM_LOCALID and SLURM_STEP_NODELIST. A batch script outside srun has no SLURM_STEP_NUM_TASKS. A step with one task is a
    run with one process.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm(environment)
    return None


def _from_torchrun(environment: Mapping[str, str]) -> RankPlace:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        present = ", ".join(name for name in names if name not in missing)
        raise ValueError(
            f"{' and '.join(missing)} must be set together with {present}, as torchrun does; or unset those and "
            "use --workers N to start the ranks"
        )
    return _check_place(
        RankPlace(
            rank=_integer(environment, "RANK"),
            size=_integer(environment, "WORLD_SIZE"),
            local_rank=_integer(environment, "LOCAL_RANK", "0"),
            address=environment["MASTER_ADDR"],
            port=_integer(environment, "MASTER_PORT"),
            agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        ),
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
    )


def _from_slurm(environment: Mapping[str, str]) -> RankPlace:
    if "SLURM_PROCID" not in environment:
        raise ValueError(
            "SLURM_PROCID must be set together with SLURM_STEP_NUM_TASKS, as srun does; start the ranks with srun"
        )
    job = _integer(environment, "SLURM_JOB_ID", "0")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_node(nodes)
    if not address:
        raise ValueError("MASTER_ADDR must name the machine of rank 0, since SLURM_STEP_NODELIST is not set")
    return _check_place(
        RankPlace(
            rank=_integer(environment, "SLURM_PROCID"),
            size=_integer(environment, "SLURM_STEP_NUM_TASKS"),
            local_rank=_integer(environment, "SLURM_LOCALID", "0"),
            address=address,
            port=_integer(environment, "MASTER_PORT", str(FIRST_PORT + job % PORTS)),
        ),
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "MASTER_PORT",
    )


def first_node(nodes: str) -> str:
    """The first machine of a Slurm node list: gpu[03-06,9],cpu1 begins with gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _check_place(place: RankPlace, rank: str, size: str, port: str) -> RankPlace:
    if not 1 <= place.size <= MOST_RANKS:
        raise ValueError(f"{size} must be between 1 and {MOST_RANKS:,}, got {place.size}")
    if not 0 <= place.rank < place.size:
        raise ValueError(f"{rank} must lie between 0 and {size} - 1 = {place.size - 1}, got {place.rank}")
    if not 0 < place.port < 65_536:
        raise ValueError(f"{port} must be a port between 1 and 65535, got {place.port}")
    return place


def _integer(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name) or default or ""
    if not re.fullmatch(r"-?\d{1,12}", text):
        raise ValueError(f"{name} must be a whole number, got {short_repr(text)}")
    return int(text)


def arrival_limit(environment: Mapping[str, str]) -> float:
    """The number of seconds that the first rank waits for the last."""
    text = environment.get("COALMINE_RANK_TIMEOUT")
    try:
        seconds = ARRIVAL if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"COALMINE_RANK_TIMEOUT must be a positive number of seconds, got {short_repr(text)}")
    return seconds


def join_group(place: RankPlace, *, device: str) -> RankGroup:
    """Connect to the other ranks. After the time limit, raise an error that names the missing ones."""
    limit = arrival_limit(os.environ)
    end = time.monotonic() + limit
    store = distributed_c10d.PrefixStore(f"coalmine/{place.attempt}", _store(place, end, limit))
    arrivals = [f"arrived/{rank}" for rank in range(place.size)]
    try:
        store.set(arrivals[place.rank], "yes")
        while not store.check(arrivals):
            if time.monotonic() > end:
                missing = [str(rank) for rank, key in enumerate(arrivals) if not store.check([key])]
                raise LostRankError(
                    f"rank {', '.join(missing)} of {place.size} did not arrive within {limit:g} s (COALMINE_RANK_TIMEOUT); "
                    "start all ranks at about the same time"
                )
            time.sleep(0.05)
    except RuntimeError as error:
        raise LostRankError(f"{place.address}:{place.port} no longer responds: rank 0 has ended") from error
    return RankGroup(store, place.rank, place.size, device=device, local=place.address in ("127.0.0.1", "localhost"))


def _store(place: RankPlace, end: float, limit: float) -> Any:
    is_host = place.rank == 0 and not place.agent
    if is_host:
        _check_port(place)
    else:
        while not can_connect(place.address, place.port):
            if time.monotonic() > end:
                raise LostRankError(
                    f"MASTER_ADDR and MASTER_PORT must be the address of rank 0, but {place.address}:{place.port} could "
                    f"not be reached for {limit:g} s (COALMINE_RANK_TIMEOUT)"
                )
            time.sleep(0.1)
    try:
        return TCPStore(
            place.address,
            place.port,
            is_master=is_host,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, end - time.monotonic())),
            master_listen_fd=listening_handle(place.address, place.port) if is_host else None,
        )
    except RuntimeError as error:
        raise LostRankError(
            f"{place.address}:{place.port} is not the store of a training ({type(error).__name__}); check "
            "MASTER_ADDR and MASTER_PORT"
        ) from error


def listening_handle(address: str, port: int) -> int:
    """The handle of a socket that listens at this address alone; a store of torch would listen on all interfaces."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(target)
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        raise
    return made.detach()


def _check_port(place: RankPlace) -> None:
    """Raise ValueError if rank 0 cannot listen on the port; torch would print a stack trace instead."""
    try:
        _bound(place.port).close()
        with _bound(0) as probe:  # on MASTER_PORT the other ranks would take the probe for the store
            probe.listen()
            reachable = can_connect(place.address, probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"MASTER_PORT must be a free port, but {place.port} is taken; choose another") from None
        raise ValueError(
            f"MASTER_PORT must be a port that this process may open, got {place.port} ({error.strerror}); choose another"
        ) from None
    if not reachable:
        raise ValueError(
            f"MASTER_ADDR must be an address of the machine of rank 0, got {short_repr(place.address)}, which cannot be "
            "reached from there"
        )


def _bound(port: int) -> socket.socket:
    """A socket bound to all addresses, not listening; IPv4 only, if the machine has no IPv6."""
    try:
        return _bound_to(port, socket.AF_INET6)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return _bound_to(port, socket.AF_INET)


def _bound_to(port: int, family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def use_own_gpu(place: RankPlace) -> None:
    """Select this rank's GPU if several are visible."""
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        if place.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"a machine must have a GPU for each of its ranks, but this one has {torch.cuda.device_count()} and rank "
                f"{place.rank} is number {place.local_rank} on it"
            )
        torch.cuda.set_device(place.local_rank)
