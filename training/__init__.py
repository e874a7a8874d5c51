"""Turns a Llama-family model into a HAMburger: data, objective, training, export, quality.

It must not know HTTP; nothing but the command line imports it.
"""
