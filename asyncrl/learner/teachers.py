"""What the teacher and the reference find of a batch, as inputs of the loss.

Legend: `T` tokens of the policy's batch, `T_m` of one microbatch, `P` its predictions, `C` hidden width.

Both are the same machinery: a replica in this process, or a served model. Log-probs of the sampled tokens are taken for
the whole batch before the first backward pass. Divergences need the policy's hidden states too, so they are taken with
each microbatch, over every different pair of a policy's and a teacher's state once. Of several ranks each asks for its
own share: a replica's passes are made by all at once, so one that has no microbatch left keeps pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from asyncrl.errors import ConfigError
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.replicas import MovingAverage, Replica
from asyncrl.learner.served import ServedModel
from asyncrl.learner.settings import LearnerJob
from asyncrl.learner.sharded import load_sharded
from asyncrl.learner.teacher_head import divergence_from_states, divergence_from_top_k
from asyncrl.learner.teacher_rows import take, teacher_rows
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings
from asyncrl.learner.vocabulary import check_same_vocabulary
from asyncrl.losses.presets import LossSettings
from asyncrl.packing import Batch, Microbatch

Asked = Replica | ServedModel


class Teachers:
    """The teacher and the reference of one learner, where it has them."""

    def __init__(
        self,
        loss: LossSettings,
        policy: PolicyModel,
        device: torch.device,
        *,
        settings: TeacherSettings | None = None,
        teacher: Asked | None = None,
        reference: Asked | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        """`average` is what moves the weights of a teacher that is an average of the policy's."""
        self.loss = loss
        self.policy = policy
        self.device = device
        self.settings = settings or TeacherSettings()
        self.teacher = teacher
        self.reference = reference
        self._average = average
        self._told = False

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return [T] nats of the trained tokens under the reference, 0.0 for others. Raises: LearnerError."""
        assert self.reference is not None
        return self.reference.logprobs(batch)

    def read(self, batch: Batch, *, reference: torch.Tensor | None = None) -> Readings:
        """Return what they find of `batch` under the present weights; `reference` [T] where it is known already.

        Raises: LearnerError where a server fails; ConfigError where the policy would be its own teacher and nobody has
        told it anything yet.
        """
        if self._average is not None:
            self._average.begin()
        self._told |= batch.teacher_prompts is not None
        if isinstance(self.teacher, Replica) and self.teacher.model is self.policy and not self._told:
            raise ConfigError(
                "source = 'self' with ema_rate = 0 needs segments with a prompt for teachers: the policy alone has "
                "nothing to teach itself; set teacher_prompts ([environment.options]), or ema_rate ([learner.teacher])"
            )
        if reference is None and self.reference is not None:
            reference = self.reference_logprobs(batch)
        return Readings(self, batch, reference)

    def advance(self) -> None:
        """Follow the policy after an optimizer step."""
        if self._average is not None:
            self._average.advance()

    def release(self) -> None:
        """Say that a run of passes has ended: what a sharded replica gathered for them goes."""
        if isinstance(self.teacher, Replica):
            self.teacher.model.release()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what the models that are asked in this process hold, the policy's own among them where it is one."""
        for asked in (self.teacher, self.reference):
            if isinstance(asked, Replica):
                yield from asked.model.model.parameters()
                yield from asked.model.model.buffers()
        if self._average is not None:
            yield from self._average.tensors()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep: nothing, unless the teacher is an average."""
        return self._average.state() if self._average is not None else {}

    def blank_state(self) -> dict[str, torch.Tensor]:
        """Return what `state` would once the average has begun, for a reader to fill."""
        return self._average.blank_state() if self._average is not None else {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned. Raises: CheckpointError."""
        if self._average is not None:
            self._average.restore(state)

    def close(self) -> None:
        """Close the connections to servers. May be called twice."""
        for asked in (self.teacher, self.reference):
            if isinstance(asked, ServedModel):
                asked.close()


class Readings:
    """What teacher and reference find of one batch."""

    def __init__(self, teachers: Teachers, batch: Batch, reference: torch.Tensor | None) -> None:
        self._teachers = teachers
        self._batch = batch
        self._per_token: dict[str, torch.Tensor] = {}  # [T], on the CPU
        loss, teacher = teachers.loss, teachers.teacher
        if reference is not None:
            self._per_token["reference_logprobs"] = reference
        if teacher is None:
            return
        self._read = teacher_rows(batch)
        if loss.advantage == "teacher" or loss.objective == "custom":
            found = teacher.logprobs(self._read.rows)
            self._per_token["teacher_logprobs"] = torch.where(batch.loss_mask, found[self._read.place.clamp(min=0)], 0)
        if loss.distillation_coef and isinstance(teacher, ServedModel):
            self._ids, self._logprobs = teacher.top_k(self._read.rows, teachers.settings.top_k)

    def given(self, microbatch: Microbatch, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss inputs [T_m] of `microbatch` by name, on the device; `hidden` [P, C] are the policy's states.

        The divergence is differentiable by `hidden` and the policy's head, and 0.0 for tokens that are not trained on.
        """
        device = self._teachers.device
        found = {name: values[microbatch.token_index].to(device) for name, values in self._per_token.items()}
        if self._teachers.loss.distillation_coef and self._teachers.teacher is not None:
            found["teacher_divergence"] = self._divergence(microbatch, hidden)
        return found

    def keep_pace(self) -> None:
        """Do what `given` does with other ranks, on one that has no microbatch left."""
        if self._teachers.loss.distillation_coef and isinstance(self._teachers.teacher, Replica):
            self._teachers.teacher.keep_pace()

    def _divergence(self, microbatch: Microbatch, hidden: torch.Tensor) -> torch.Tensor:
        trained = self._batch.loss_mask[microbatch.token_index[microbatch.scored_index]]
        where = microbatch.scored_index[trained]
        student = microbatch.prediction_index[trained]
        place = self._read.place[microbatch.token_index[where]]
        if isinstance(self._teachers.teacher, Replica):
            values = self._from_states(self._teachers.teacher, microbatch, hidden, student, place)
        else:
            values = self._from_server(hidden, student, place)
        result = values.new_zeros(len(microbatch.token_index))
        return result.index_put((where.to(self._teachers.device),), values)

    def _from_states(
        self,
        teacher: Replica,
        microbatch: Microbatch,
        hidden: torch.Tensor,
        student: torch.Tensor,
        place: torch.Tensor,
    ) -> torch.Tensor:
        settings, policy, device = self._teachers.settings, self._teachers.policy, self._teachers.device
        rows, stood = take(self._read.rows, microbatch.segment_index)
        states, row = teacher.states(rows)
        row_at = torch.full((self._read.rows.num_tokens,), -1, dtype=torch.int64)
        row_at[stood] = row
        told = row_at[place]
        assert bool((told >= 0).all()), "a trained token has no place in the teacher's rows"
        pairs, pair = torch.unique(torch.stack([student, told], 1), dim=0, return_inverse=True)
        vocabulary = min(len(policy.head), len(teacher.model.head))  # heads differ by padding rows at most
        values = divergence_from_states(
            hidden.index_select(0, pairs[:, 0].to(device)),
            policy.head[:vocabulary],
            states.index_select(0, pairs[:, 1].to(device)),
            teacher.model.head[:vocabulary],
            kind=settings.divergence,
            beta=settings.beta,
            top_k=settings.top_k,
            support=settings.support,
            temperature=policy.temperature,
            logits_dtype=policy.head_dtype,
        )
        return values.index_select(0, pair.to(device))

    def _from_server(self, hidden: torch.Tensor, student: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        settings, policy, device = self._teachers.settings, self._teachers.policy, self._teachers.device
        return divergence_from_top_k(
            hidden.index_select(0, student.to(device)),
            policy.head,
            self._ids[place].to(device),
            self._logprobs[place].to(device),
            kind=settings.divergence,
            beta=settings.beta,
            temperature=policy.temperature,
            logits_dtype=policy.head_dtype,
        )


def open_teachers(
    job: LearnerJob,
    policy: PolicyModel,
    masters: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    ranks: Ranks = ALONE,
) -> Teachers:
    """Return the teacher and the reference that `job` names, loaded or connected to; `masters` are the policy's.

    A model is sharded over `ranks` as the policy is.

    Raises: ConfigError for a model or server that speaks of other tokens than the policy; LearnerError for a server
    that does not answer.
    """
    loss, settings = job.learner.resolved_loss, job.learner.teacher
    average = None
    if settings.source == "none":
        teacher: Asked | None = None
    elif settings.source == "self" and not settings.ema_rate:
        teacher = _replica(job, policy, device, ranks)
    elif settings.source == "self":
        model = _frozen(job, job.model, device, ranks)
        teacher, average = _replica(job, model, device, ranks), MovingAverage(model, masters, settings.ema_rate)
    else:
        teacher = _asked(job, policy, settings, device, ranks, "[learner.teacher]", top_k=settings.top_k)
    reference: Asked | None = None
    if job.learner.needs_reference:
        reference = _asked(job, policy, job.learner.reference, device, ranks, "[learner.reference]")
    return Teachers(loss, policy, device, settings=settings, teacher=teacher, reference=reference, average=average)


def _asked(
    job: LearnerJob,
    policy: PolicyModel,
    settings: TeacherSettings | ReferenceSettings,
    device: torch.device,
    ranks: Ranks,
    section: str,
    *,
    top_k: int = 0,
) -> Asked:
    if settings.source == "engine":
        served = ServedModel(settings.url, timeout_s=settings.timeout_s, section=section, ranks=ranks)
        served.check(job.model, top_k=top_k)
        return served
    if settings.source == "model" and ranks.is_first:
        check_same_vocabulary(job.model, settings.path, section)
    below = policy.base()
    if settings.source == "start" and below is not None:  # the starting weights are there already
        return _replica(job, below, device, ranks)
    path = settings.path if settings.source == "model" else job.model
    return _replica(job, _frozen(job, path, device, ranks), device, ranks)


def _frozen(job: LearnerJob, path: Path, device: torch.device, ranks: Ranks) -> PolicyModel:
    load = load_model if ranks.count == 1 else partial(load_sharded, ranks=ranks, frozen=True)
    model = load(
        path,
        dtype=getattr(torch, job.learner.dtype),
        device=device,
        temperature=job.temperature,
        head_dtype=torch.float32 if job.learner.head_dtype == "float32" else None,
        gradient_checkpointing=False,
        attention=job.learner.attention,
        compiled=job.learner.compiled_by,
    )
    model.model.requires_grad_(False)
    return model


def _replica(job: LearnerJob, model: PolicyModel, device: torch.device, ranks: Ranks) -> Replica:
    size, share = job.learner.microbatch_tokens, job.learner.share_prefixes
    return Replica(model, device, max_tokens=size, share_prefixes=share, ranks=ranks)
