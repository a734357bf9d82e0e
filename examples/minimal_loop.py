"""The method in one flat file of plain PyTorch and transformers: distil on-policy, find what stays expensive, ban it.

    python examples/minimal_loop.py                          # the built-in pair, offline, about three minutes
    python examples/minimal_loop.py --freeze So Now Then Next  # the same without the loss on these tokens

Of rocktokens it uses only the built-in world: two model directories, problems, an answer checker.
Shapes: B rollouts, T positions of prompt + response, R response positions, V vocabulary.
"""

import argparse
import copy
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocktokens.world import get_world


@torch.no_grad()
def sample(model, prompts, *, eos, pad, rng, max_new=64, banned=()):
    """Sample one response to each prompt at T = 1. Returns ids_BT (left-padded prompts), and where responses begin."""
    start = max(map(len, prompts))
    ids_BT = torch.tensor([[pad] * (start - len(p)) + list(p) for p in prompts])
    seen_BT = torch.tensor([[0] * (start - len(p)) + [1] * len(p) for p in prompts])
    position_B = seen_BT.sum(1) - 1
    new_BT, past = ids_BT, None
    position_BT = (seen_BT.cumsum(1) - 1).clamp_min(0)
    done_B = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(max_new):
        out = model(new_BT, attention_mask=seen_BT, position_ids=position_BT, past_key_values=past, use_cache=True)
        past, logits_BV = out.past_key_values, out.logits[:, -1].float()
        logits_BV[:, list(banned)] = -torch.inf
        next_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=rng).squeeze(1).masked_fill(done_B, pad)
        new_BT, position_B = next_B[:, None], position_B + 1
        position_BT = position_B[:, None]
        ids_BT = torch.cat([ids_BT, new_BT], 1)
        seen_BT = torch.cat([seen_BT, (~done_B).long()[:, None]], 1)
        done_B |= next_B == eos
        if done_B.all():
            break
    return ids_BT, seen_BT, start


def log_probs(model, ids_BT, seen_BT, start):
    """log p of every token at every response position, on the same prefixes for whichever model."""
    position_BT = (seen_BT.cumsum(1) - 1).clamp_min(0)
    hidden_BTH = model.model(ids_BT, attention_mask=seen_BT, position_ids=position_BT).last_hidden_state
    return model.lm_head(hidden_BTH[:, start - 1 : -1]).float().log_softmax(-1)


def reverse_kl(student_BRV, teacher_BRV):
    """KL(student || teacher) at every response position, in nats."""
    return (student_BRV.exp() * (student_BRV - teacher_BRV)).sum(-1)


def distil(student, teacher, prompts, *, steps, lr, rollouts, eos, pad, frozen=(), seed=0, log_every=20):
    """On-policy distillation; `frozen` token types carry no loss where they are PREDICTED. Returns the loss by step."""
    rng = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
    frozen_F, history, began = torch.tensor(list(frozen), dtype=torch.long), [], time.time()
    for step in range(steps):
        warm, left = (step + 1) / (0.05 * steps), (steps - step) / (0.95 * steps)
        optimiser.param_groups[0]["lr"] = lr * min(1.0, warm, left)  # 5 % warm-up, then linear to 0
        picked_B = torch.randint(len(prompts), (rollouts,), generator=rng)
        ids_BT, seen_BT, start = sample(student, [prompts[i] for i in picked_B], eos=eos, pad=pad, rng=rng)
        with torch.no_grad():
            teacher_BRV = log_probs(teacher, ids_BT, seen_BT, start)
        kl_BR = reverse_kl(log_probs(student, ids_BT, seen_BT, start), teacher_BRV)
        response_BR, token_BR = seen_BT[:, start:].bool(), ids_BT[:, start:]
        weight_BR = response_BR & ~torch.isin(token_BR, frozen_F)
        loss = (kl_BR * weight_BR).sum() / weight_BR.sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        history.append(loss.item())
        if log_every and (step + 1) % log_every == 0:
            recent = sum(history[-log_every:]) / log_every
            print(f"step {step + 1:4d}  loss {recent:.4f} nats a token  {time.time() - began:.0f} s", flush=True)
    return history


@torch.no_grad()
def score(models, teacher, rollouts):
    """Reverse KL of each model on the same occurrences: fixed contexts. Returns token_N and one loss_N a model."""
    ids_BT, seen_BT, start = rollouts
    response_BR = seen_BT[:, start:].bool()
    teacher_BRV = log_probs(teacher, ids_BT, seen_BT, start)
    losses = [reverse_kl(log_probs(m, ids_BT, seen_BT, start), teacher_BRV)[response_BR] for m in models]
    return ids_BT[:, start:][response_BR], losses


def accuracy(model, tokenizer, problems, check, *, seed=0, banned=()):
    """Share of problems answered right, one rollout each, with its standard error."""
    rng = torch.Generator().manual_seed(seed)
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    ends = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    right = []
    for i in range(0, len(prompts), 250):
        ids_BT, _, start = sample(model, prompts[i : i + 250], **ends, rng=rng, banned=banned)
        texts = tokenizer.batch_decode(ids_BT[:, start:], skip_special_tokens=True)
        right += [check(text, problem.answer) for text, problem in zip(texts, problems[i : i + 250], strict=True)]
    share = sum(right) / len(right)
    return share, (share * (1 - share) / len(right)) ** 0.5


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--world", default="arithmetic")
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--lr", type=float, default=3e-4)
    flags.add_argument("--rollouts", type=int, default=64)
    flags.add_argument("--problems", type=int, default=1000, help="held-out problems for every accuracy")
    flags.add_argument("--freeze", nargs="*", default=[], help="tokens that carry no loss")
    flags.add_argument("--top", type=int, default=6, help="how many token types to show and to ban")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

    world = get_world(args.world)
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    student, teacher = map(AutoModelForCausalLM.from_pretrained, (world.student_path, world.teacher_path))
    before, ends = copy.deepcopy(student), {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    train = [tokenizer(p.prompt)["input_ids"] for p in world.problems("train", 5000, seed=args.seed)]
    held_out = world.problems("causal", args.problems, seed=args.seed)
    for name, model in {"teacher": teacher, "student before": student}.items():
        print("accuracy of the {}: {:.3f} ± {:.3f}".format(name, *accuracy(model, tokenizer, held_out, world.check)))
    frozen = tokenizer.convert_tokens_to_ids(args.freeze)
    distil(student, teacher, train, steps=args.steps, lr=args.lr, rollouts=args.rollouts, frozen=frozen, **ends)
    print("accuracy of the student after: {:.3f} ± {:.3f}".format(*accuracy(student, tokenizer, held_out, world.check)))

    fixed = [tokenizer(p.prompt)["input_ids"] for p in world.problems("detection", 500, seed=args.seed)]
    rollouts = sample(student, fixed, rng=torch.Generator().manual_seed(args.seed), **ends)
    token_N, (pre_N, post_N) = score([before, student], teacher, rollouts)
    burden_V = torch.zeros(len(tokenizer)).index_add_(0, token_N, post_N)
    print(f"\n{'token':>10}  share of loss  of positions  enrichment  loss pre → post   accuracy when banned")
    for v in burden_V.topk(args.top).indices.tolist():
        is_v_N, share = token_N == v, burden_V[v].item() / burden_V.sum().item()
        rate, name = is_v_N.float().mean().item(), repr(tokenizer.decode([v]))
        banned, error = accuracy(student, tokenizer, held_out, world.check, banned=[v])
        print(f"{name:>10}  {share:13.3f}  {rate:12.3f}  {share / rate:10.1f}  {pre_N[is_v_N].mean():8.3f} → "
              f"{post_N[is_v_N].mean():.3f}  {banned:.3f} ± {error:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
