"""Models with a `train_step` of the user's own, as in Keras's code examples, but small."""

import keras
import small_models as models
import tensorflow as tf

layers = keras.layers


def dense(inputs, outputs, **arguments):
    return keras.Sequential([layers.Input((inputs,)), layers.Dense(outputs, **arguments)])


class VAE(keras.Model):
    """An autoencoder without a `call`, with metrics of its own; it draws noise."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = dense(8, 4), dense(2, 8, dtype="float32")
        self.loss_tracker = keras.metrics.Mean(name="total")
        self.seed_generator = keras.random.SeedGenerator(1)

    @property
    def metrics(self):
        return [self.loss_tracker]

    def loss_of(self, x):
        mean, log_var = tf.split(tf.cast(self.encoder(x), "float32"), 2, axis=-1)
        noise = keras.random.normal(tf.shape(mean), seed=self.seed_generator)
        found = self.decoder(mean + tf.exp(0.5 * log_var) * noise)
        kl = -0.5 * tf.reduce_sum(1 + log_var - mean**2 - tf.exp(log_var), axis=-1)
        return tf.reduce_mean(tf.reduce_sum((x - found) ** 2, axis=-1) + 0.1 * kl)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(data)[0])
        return {"loss": self.loss_tracker.result()}


class TestedVAE(VAE):
    def test_step(self, data):
        self.loss_tracker.update_state(self.loss_of(data), sample_weight=tf.shape(data)[0])
        return {"loss": self.loss_tracker.result()}


def vae(*, kind=TestedVAE):
    return models.compiled(kind(), "adam")


class GAN(keras.Model):
    """Two networks, each with an optimizer that the overridden `compile` takes."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = dense(3, 8), dense(8, 1)
        self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    def compile(self, d_optimizer, g_optimizer, **arguments):
        super().compile(**arguments)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        noise = keras.random.normal((tf.shape(data)[0], 3), seed=3)
        both = tf.concat([data, tf.cast(self.generator(noise), data.dtype)], axis=0)
        labels = tf.concat([tf.ones_like(data[:, :1]), tf.zeros_like(data[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            scores = tf.cast(self.discriminator(both), "float32")
            d_loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, scores))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:  # The generator sees the new discriminator.
            scores = tf.cast(self.discriminator(self.generator(noise)), "float32")
            g_loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(scores), scores)
            )
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan():
    return models.compiled(GAN(), keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.002))


class Distiller(keras.Model):
    """A student that learns from a teacher, whose weights its optimizer never gets."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = models.mlp(), dense(8, 3, activation="softmax")

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        soft = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            y_pred = self.student(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            loss += tf.reduce_mean(keras.losses.kl_divergence(soft, y_pred))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss} | self.compute_metrics(x, y, y_pred)


def distiller(optimizer="adam"):
    model = Distiller()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
