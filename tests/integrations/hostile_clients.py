"""Clients that send bad replies, each kind with a name, and a grid with one of them."""

import numpy as np
from flower_training import REAL, SMALL, LoopGrid, client_app, nodes
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from coalmine.canaries import RotatedCanaries

MANY = 24  # canaries, enough for a PASS of the honest pipeline
CLIENT, CANARY = 3, REAL + 6  # node ids of a real client and of canary 5
OWN = 5  # the canary of node CANARY


class HostileGrid(LoopGrid):
    """A LoopGrid in which `attack` replaces one node's replies, given the honest reply, the message and the round.

    It returns a list of replies. Each message has its own id, as in Flower's grids.
    """

    def __init__(self, app, node_configs, node, attack, **settings):
        super().__init__(app, node_configs, **settings)
        self.node, self.attack = node, attack

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            (config,) = message.content.config_records.values()
            message.metadata.__dict__["_message_id"] = f"{config['server-round']}-{message.metadata.dst_node_id}"
        replies = []
        for reply in super().send_and_receive(messages, timeout=timeout):
            if reply.metadata.src_node_id != self.node or reply.has_error():
                replies.append(reply)
                continue
            message = next(m for m in messages if m.metadata.dst_node_id == self.node)
            replies += self.attack(reply, message)
        return replies


def hostile_grid(attack, *, node=CLIENT, mods=(), canaries=MANY, **settings):
    return HostileGrid(client_app(mods), nodes(REAL, canaries), node, attack, **settings)


def in_turn(attacks):
    """The first attack in round 1, the second in round 2, and so on: one run covers many kinds."""
    listed = list(attacks)

    def attack(reply, message):
        (config,) = message.content.config_records.values()
        return listed[(config["server-round"] - 1) % len(listed)](reply, message)

    return attack


def changed(change):
    """An attack that changes the content of the honest reply."""

    def attack(reply, message):
        change(reply.content)
        return [reply]

    return attack


def with_arrays(change):
    """An attack on the arrays: `change` takes a dict of numpy arrays and returns arrays by name."""

    def attack(reply, message):
        values = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        found = change(values)
        arrays = {name: v if isinstance(v, Array) else Array(np.asarray(v)) for name, v in found.items()}
        reply.content["arrays"] = ArrayRecord(arrays)
        return [reply]

    return attack


def each(change):
    """An attack that changes every array in the same way."""
    return with_arrays(lambda values: {name: change(array) for name, array in values.items()})


def with_weight(weight):
    def change(content):
        content["metrics"] = MetricRecord({**content["metrics"], "num-examples": weight})

    return changed(change)


def with_metrics(metrics):
    return changed(lambda content: content.update({"metrics": MetricRecord(metrics)}))


def claiming(record):
    """An attack that replaces a canary's record by this one, or adds it to a real client's update."""
    return changed(lambda content: content.update({"coalmine": record}))


def canary_update(index, seed, *, canaries=MANY, dim=SMALL):
    return RotatedCanaries(canaries, dim, seed=seed).canary(index)


def sending(update, claim=None):
    """An attack that sends the model plus `update` (a vector or a function of the round) and claims to be a canary."""

    def attack(reply, message):
        (config,) = message.content.config_records.values()
        step = update(config["server-round"]) if callable(update) else update
        arrays, place = {}, 0
        for name, array in message.content["arrays"].items():
            values = array.numpy()
            part = step[place : place + values.size].reshape(values.shape)
            arrays[name] = Array(np.asarray(values + part, dtype=values.dtype))
            place += values.size
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": reply.content["metrics"]})
        if claim is not None:
            content["coalmine"] = ConfigRecord({"canary": claim})
        return [Message(content, reply_to=message)]

    return attack


def damaged(array, data):
    return Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=data)


def with_data(change):
    """An attack on the bytes of the first array."""

    def attack(content):
        arrays = dict(content["arrays"])
        arrays["first"] = damaged(arrays["first"], change(arrays["first"].data))
        content["arrays"] = ArrayRecord(arrays)

    return changed(attack)


def renamed(content, old, new):
    content[new] = content[old]
    del content[old]


def removed(name):
    return changed(lambda content: content.__delitem__(name))


def twice(reply, message):
    return [reply, Message(RecordDict(dict(reply.content)), reply_to=message)]


def late():
    """An attack that sends the reply of the previous round."""
    before = []

    def attack(reply, message):
        before.append(reply)
        return before[-2:-1]

    return attack


def late_and_fresh():
    """An attack that sends the reply of the previous round before the current one."""
    before = []

    def attack(reply, message):
        before.append(reply)
        return before[-2:]

    return attack


def as_another_node(reply, message):
    """A reply from a node that was not sampled."""
    stranger = Message(RecordDict(dict(reply.content)), reply_to=message)
    stranger.metadata.__dict__["_src_node_id"] = 10**6
    return [reply, stranger]


def failing(reply, message):
    return [Message(Error(code=0, reason="\x1b[31mno\n" * 1000), reply_to=message)]


def empty(reply, message):
    return [Message(RecordDict(), reply_to=message)]


WEIGHTS = {
    "weight NaN": with_weight(float("nan")),
    "weight infinite": with_weight(float("inf")),
    "weight negative": with_weight(-10),
    "weight zero": with_weight(0),
    "weight 1e7": with_weight(10**7),
    "weight 1e300": with_weight(1e300),
    "weight 1e-300": with_weight(1e-300),
    "weight too long for a float": with_weight(10**400),
    "weight a list": with_weight([10, 10]),
    "weight an empty list": with_weight([]),
    "weight missing": with_metrics({"loss": 1.0}),
}
RECORDS = {
    "metrics missing": removed("metrics"),
    "metrics under another name": changed(lambda content: renamed(content, "metrics", "numbers")),
    "metrics twice": changed(lambda content: content.update({"more": MetricRecord({"num-examples": 10})})),
    "another metric": with_metrics({"num-examples": 10, "loss": 1.0, "more": 2.0}),
    "a metric missing": with_metrics({"num-examples": 10}),
    "a metric as a list": with_metrics({"num-examples": 10, "loss": [1.0, 2.0]}),
    "a metric too long for a float": with_metrics({"num-examples": 10, "loss": 10**400}),
    "arrays missing": removed("arrays"),
    "arrays under another name": changed(lambda content: renamed(content, "arrays", "model")),
    "arrays twice": changed(lambda content: content.update({"again": content["arrays"]})),
    "nothing": empty,
}
ARRAYS = {
    "an array missing": with_arrays(lambda values: {"first": values["first"]}),
    "an array more": with_arrays(lambda values: {**values, "more": np.zeros(3, np.float32)}),
    "an array renamed": with_arrays(lambda values: {"first": values["first"], "\x1b[31mlast\n": values["last"]}),
    "no array": with_arrays(lambda values: {}),
    "another shape": with_arrays(lambda values: {**values, "first": values["first"].T}),
    "another size": with_arrays(lambda values: {**values, "last": values["last"][:5]}),
    "a shape that broadcasts": with_arrays(lambda values: {**values, "last": values["last"][:1]}),
    "whole numbers": each(lambda values: values.astype(np.int32)),
    "truth values": each(lambda values: values > 0),
    "complex": each(lambda values: values.astype(np.complex64)),
    "text": each(lambda values: values.astype("U8")),
    "dates": each(lambda values: values.astype("i8").astype("M8[s]")),
    "a record dtype": each(lambda values: np.zeros(values.shape, [("a", "f4"), ("b", "f4")])),
    "NaN": each(lambda values: values * np.nan),
    "one NaN": with_arrays(lambda values: {**values, "last": np.where(np.arange(10) == 3, np.nan, values["last"])}),
    "infinity": each(lambda values: np.where(values > 0, np.inf, values)),
    "huge": each(lambda values: np.full_like(values, 3e38)),
    "huge double": each(lambda values: np.full(values.shape, 1e300)),
    "bytes cut": with_data(lambda data: data[: len(data) // 2]),
    "bytes missing": with_data(lambda data: b""),
    "bytes random": with_data(lambda data: bytes(range(256)) * 40),
    "header damaged": with_data(lambda data: data.replace(b"descr", b"desc(")),
    "header nested": with_data(lambda data: data[:8] + b"\xff\xff" + b"(" * 65535),
    "shape beyond memory": with_data(lambda data: data.replace(b"(10, 199), }" + b" " * 6, b"(999999999999,), }")),
    "pickled": with_data(lambda data: b"\x80\x04N."),
    "zip archive": with_data(lambda data: b"PK\x03\x04" + data),
    "another serialisation": with_arrays(
        lambda values: {**values, "last": Array(dtype="float32", shape=(10,), stype="pickle", data=b"x")}
    ),
}
CLAIM_RECORDS = {
    "canary out of range": ConfigRecord({"canary": 10**6}),
    "canary just out of range": ConfigRecord({"canary": MANY}),
    "canary negative": ConfigRecord({"canary": -1}),
    "canary a text": ConfigRecord({"canary": "5"}),
    "canary a fraction": ConfigRecord({"canary": 5.0}),
    "canary a truth value": ConfigRecord({"canary": True}),
    "canary a list": ConfigRecord({"canary": [5]}),
    "canary bytes": ConfigRecord({"canary": b"5"}),
    "canary missing": ConfigRecord({}),
    "canary with more": ConfigRecord({"canary": OWN, "also": 7}),
    "canary in a metric record": MetricRecord({"canary": OWN}),
    "canary in an array record": ArrayRecord({"canary": Array(np.zeros(1))}),
    "another canary": ConfigRecord({"canary": OWN + 1}),
}
CLAIMS = {name: claiming(record) for name, record in CLAIM_RECORDS.items()}
