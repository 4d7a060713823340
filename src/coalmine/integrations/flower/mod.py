"""The client's side: a mod that makes a canary of a designated client."""

from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ConfigRecord, Context, Message

from coalmine.integrations.flower.announcement import PREFIX, REPLY, Announcement
from coalmine.integrations.flower.layout import Layout

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable


def canary_mod(message: Message, context: Context, call_next: "ClientAppCallable") -> Message:
    """Send a canary in the place of a designated client's update, and tell the server which one; others train as ever.

    Put it last in `mods`, so that clipping, local noise and secure aggregation treat a canary as any client's update. A
    designated client trains too, so its reply has every record and metric that the strategy expects.
    """
    config = next((c for c in message.content.config_records.values() if PREFIX + "dim" in c), None)
    if config is None or not message.metadata.message_type.startswith("train"):
        return call_next(message, context)
    announcement = Announcement.from_config(config)
    index = announcement.index_of(config, context.node_config)
    if index is None:
        return call_next(message, context)
    (received,) = message.content.array_records.values()
    layout = Layout.of(received, announcement.left_out)
    if layout.dim != announcement.dim:
        raise ValueError(f"the audit is of {announcement.dim} numbers, but this model has {layout.dim}")
    seed = announcement.seed_for(context.node_config)
    update = announcement.update(index, seed, np.empty(0, layout.dtype))
    sent = layout.moved(received, update)  # before the client trains, which may be in place
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    (name,) = reply.content.array_records
    reply.content[name] = sent
    reply.content[REPLY] = ConfigRecord({"canary": index})
    return reply
