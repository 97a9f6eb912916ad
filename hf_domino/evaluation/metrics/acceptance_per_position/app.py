"""The Space's page: a form for the metric."""

import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load("acceptance_per_position.py"))
