"""TensorFlow Privacy 0.9: a sum query, and a Keras optimizer with its microbatches."""

import numpy as np

from studies.field.project import Check, Project, bare, part

QUERY = "tensorflow_privacy.privacy.dp_query"


def prepared():
    bare("tensorflow_privacy", "tensorflow_privacy.privacy", QUERY, "tensorflow_privacy.privacy.optimizers")


def query(noise):
    prepared()
    import tensorflow as tf

    summed = part(f"{QUERY}.gaussian_query", "GaussianSumQuery")(1.0, noise)
    state, run = [summed.initial_global_state()], part(f"{QUERY}.test_utils", "run_query")
    return lambda rows: np.array(run(summed, [tf.constant(row, tf.float32) for row in rows], state[0])[0])


def keras(noise, microbatches=None):
    prepared()
    import tensorflow as tf

    kind = part("tensorflow_privacy.privacy.optimizers.dp_optimizer_keras", "make_keras_optimizer_class")
    made = kind(part("tf_keras", "optimizers").legacy.SGD)(1.0, noise, num_microbatches=microbatches, learning_rate=1.0)
    weights = tf.Variable(tf.zeros([1_000]))

    def release(rows):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(tf.constant(rows, tf.float32), weights)
        return np.array(made._compute_gradients(loss, [weights], tape=tape)[0][0])

    return release


OPTIONS = {"dim": 1_000, "clients": 40}
WHY = "the batch is one microbatch: its mean is clipped, so one record turns the sum of the others around"
PROJECT = Project(
    packages=("tensorflow-privacy==0.9.0",), base=("tensorflow-cpu==2.18.1", "tf_keras==2.18.0"),
    where="tensorflow_privacy/privacy/dp_query/gaussian_query.py:87 and optimizers/dp_optimizer_keras.py",
    claim="`noise_multiplier`: ratio of the standard deviation to the clipping norm (docstring)",
    checks=(
        Check(name="GaussianSumQuery", make=query, expected="PASS", why="clip of each, noise on the sum", options=OPTIONS),
        Check(name="DPKerasSGD", make=keras, expected="PASS", why="clip of each, noise z·C/n", options=OPTIONS),
        Check(name="num_microbatches=1", make=lambda n: keras(n, 1), expected="not PASS", why=WHY, options=OPTIONS),
    ),
)  # fmt: skip
