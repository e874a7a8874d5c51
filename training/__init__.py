"""Turns a Llama-family model into a HAMburger: data, objective, training, export, quality."""
