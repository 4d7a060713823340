"""A client: trains on its own digits."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod

from audited_digits.task import partition, train
from coalmine.integrations.flower import canary_mod

app = ClientApp(mods=[fixedclipping_mod, canary_mod])


@app.train()
def train_digits(message: Message, context: Context) -> Message:
    """Train for one round."""
    settings, node = context.run_config, context.node_config
    part = int(node.get("partition-id", node.get("data-part", 0)))
    data = partition(part, int(settings["clients"]))
    model = train(message.content["arrays"], data, int(settings["local-epochs"]), float(settings["learning-rate"]))
    metrics = MetricRecord({"num-examples": 1})  # equal weights, which the noise assumes
    return Message(RecordDict({"arrays": model, "metrics": metrics}), reply_to=message)
