"""Slow float64 definitions in plain numpy, in probability space; imports nothing of ours.

Everything here is written from the definition, one row at a time, with explicit Jacobians instead of simplified
gradients, so that a swapped argument or a lost factor in the package cannot be repeated here.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of one row; a logit of -inf is a probability of exactly 0."""
    logits = np.asarray(logits, dtype=np.float64)
    unnormalised = np.exp(logits - logits.max())
    return unnormalised / unnormalised.sum()


def head_logits(hidden, head, bias=None, scale=1.0, softcap=None, temperature=1.0) -> np.ndarray:
    """What a model family does between the last hidden state and the softmax."""
    logits = np.asarray(head, dtype=np.float64) @ np.asarray(hidden, dtype=np.float64)
    if bias is not None:
        logits = logits + np.asarray(bias, dtype=np.float64)
    logits = scale * logits
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    return logits / temperature


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Sum of p ln(p / q) over the tokens that p can emit; infinite if q cannot emit one of them."""
    total = 0.0
    for p_u, q_u in zip(p, q):
        if p_u > 0:
            total += math.inf if q_u == 0 else p_u * math.log(p_u / q_u)
    return total


def reverse_kl(student: np.ndarray, teacher: np.ndarray, beta: float = 0.5) -> float:
    """The student is the one that is averaged over."""
    return kl(student, teacher)


def forward_kl(student: np.ndarray, teacher: np.ndarray, beta: float = 0.5) -> float:
    """The teacher is the one that is averaged over."""
    return kl(teacher, student)


def jsd(student: np.ndarray, teacher: np.ndarray, beta: float = 0.5) -> float:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = (1 - beta) student + beta teacher."""
    mixture = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def todi(student: np.ndarray, teacher: np.ndarray, beta: float = 0.5) -> float:
    """Each token pays forward KL with weight a and reverse KL with 1 - a, a = teacher / (teacher + student)."""
    a = teacher / (teacher + student)
    return float((a * teacher * np.log(teacher / student) + (1 - a) * student * np.log(student / teacher)).sum())


def srkl(student: np.ndarray, teacher: np.ndarray, beta: float = 0.5) -> float:
    """KL(student || 0.1 student + 0.9 teacher)."""
    return kl(student, 0.1 * student + 0.9 * teacher)


MEASURES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd, "todi": todi, "srkl": srkl}


def entropy(p: np.ndarray) -> float:
    """Shannon entropy in nats; 0 ln 0 is 0."""
    return float(sum(-p_u * math.log(p_u) for p_u in p if p_u > 0))


def log_ratio(student: np.ndarray, teacher: np.ndarray, token: int) -> float:
    """Logarithm of how many times likelier the student makes the token."""
    return math.log(student[token] / teacher[token])


def slope_in_probabilities(student: np.ndarray, teacher: np.ndarray, kind: str, beta: float = 0.5) -> np.ndarray:
    """Partial derivative of the measure in each student probability, as if they were free."""
    if kind == "reverse_kl":
        return np.log(student / teacher) + 1.0
    if kind == "forward_kl":
        return -teacher / student
    if kind == "todi":  # the weights are held fixed, as the source detaches them
        a = teacher / (teacher + student)
        return -a * teacher / student + (1 - a) * (np.log(student / teacher) + 1.0)
    if kind == "srkl":
        skewed = 0.1 * student + 0.9 * teacher
        return np.log(student / skewed) + 1.0 - 0.1 * student / skewed
    mixture = (1 - beta) * student + beta * teacher
    of_teacher_term = -teacher / mixture * (1 - beta)
    of_student_term = np.log(student / mixture) + 1.0 - student / mixture * (1 - beta)
    return beta * of_teacher_term + (1 - beta) * of_student_term


def logit_gradient(student, teacher, kind: str, beta: float = 0.5, temperature: float = 1.0) -> np.ndarray:
    """Gradient of the measure in the logits before temperature, through the full softmax Jacobian."""
    softmax_jacobian = np.diag(student) - np.outer(student, student)
    return softmax_jacobian @ slope_in_probabilities(student, teacher, kind, beta) / temperature


def divergence(
    student_hidden,
    student_head,
    teacher_hidden,
    teacher_head,
    *,
    tokens=None,
    weights=None,
    kind="reverse_kl",
    beta=0.5,
    temperature=1.0,
    student_bias=None,
    teacher_bias=None,
    student_softcap=None,
    teacher_softcap=None,
    student_scale=1.0,
    teacher_scale=1.0,
    denominator=None,
) -> SimpleNamespace:
    """Every row by itself; the loss is the sum of weight x value over the denominator (default: sum of weights)."""
    student_hidden = np.asarray(student_hidden, dtype=np.float64)
    student_head = np.asarray(student_head, dtype=np.float64)
    rows = len(student_hidden)
    weights = np.ones(rows) if weights is None else np.asarray(weights, dtype=np.float64)
    tokens = np.zeros(rows, dtype=int) if tokens is None else np.asarray(tokens)
    denominator = weights.sum() if denominator is None else denominator
    measured = []
    grad_hidden = np.zeros_like(student_hidden)
    grad_head = np.zeros_like(student_head)
    grad_bias = np.zeros(len(student_head))
    for i in range(rows):
        student = probabilities(
            head_logits(student_hidden[i], student_head, student_bias, student_scale, student_softcap, temperature)
        )
        teacher = probabilities(
            head_logits(teacher_hidden[i], teacher_head, teacher_bias, teacher_scale, teacher_softcap, temperature)
        )
        in_logits = logit_gradient(student, teacher, kind, beta, temperature)
        measured.append(
            {
                "value": MEASURES[kind](student, teacher, beta),
                "log_ratio": log_ratio(student, teacher, tokens[i]),
                "student_logprob": math.log(student[tokens[i]]),
                "teacher_logprob": math.log(teacher[tokens[i]]),
                "student_entropy": entropy(student),
                "teacher_entropy": entropy(teacher),
                "grad_norm": math.sqrt(float((in_logits**2).sum())),
            }
        )
        in_projection = student_scale * in_logits
        if student_softcap is not None:
            uncapped = head_logits(student_hidden[i], student_head, student_bias, student_scale)
            in_projection = in_projection / np.cosh(uncapped / student_softcap) ** 2
        share = weights[i] / denominator
        grad_hidden[i] = share * in_projection @ student_head
        grad_head += share * np.outer(in_projection, student_hidden[i])
        grad_bias += share * in_projection
    found = {name: np.array([row[name] for row in measured]) for name in measured[0]}
    loss = float((weights * found["value"]).sum() / denominator)
    return SimpleNamespace(loss=loss, grad_hidden=grad_hidden, grad_head=grad_head, grad_bias=grad_bias, **found)
