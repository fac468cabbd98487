"""The model: embedding, blocks, final norm, head, and multi-token prediction behind it (DeepSeek-V3, arXiv 2412.19437).

`forward(tokens [B, S + 1])` returns the losses of one microbatch; `hidden` and `loss` are its parts, for evaluation,
`logits` is for generation. The precision plan is filled in while the model is built, one row a GEMM, names equal to
module paths.

Build on the meta device, then `to_empty(device=...)`, `init_weights(seed)`, `precision.bind(...)`.

Legend: B batch, S sequence, D hidden, V vocabulary, E experts, P pairs of rotary dimensions.
"""

import torch
from torch import Tensor, nn

from models.block import Block, DenseBlock, MoEBlock
from models.config import ModelConfig, NormPosition
from models.context import ContextSplit
from models.documents import beyond, bounds_of, documents_of
from models.layers import FFN, Embedding, RMSNorm, normed, qk_bound, rope_table, softmax_scale
from models.loss import Losses, targets_ahead
from models.mla import MLA
from models.moe import MoE
from models.mtp import MTPBlock, tokens_ahead
from models.router import Gate
from models.slots import Slots
from models.stage import Pipeline, Stage
from models.tensor import TensorSplit
from precision import IGNORED, Linear, Plan, document_mask, linear_cross_entropy, refresh_weights
from precision.errors import UserError


class DeepSeek(nn.Module):
    """A DeepSeek-style language model. UserError for a config that cannot be built or a plan that does not fit it."""

    def __init__(self, config: ModelConfig, plan: Plan):
        super().__init__()
        config.validate()
        self.config = config
        D, eps = config.hidden_size, config.rms_norm_eps
        post = config.norm_position is NormPosition.post
        gain = config.num_layers**-0.5 if post else None
        residual = plan.tensor("residual", "residual").dtype
        self.embed = Embedding(plan, "embed", config.vocab_size, D, residual, 1 / config.init_std if post else 1.0)
        blocks: list[Block] = []
        for i in range(config.num_layers):
            name = f"layers.{i}"
            attn = _mla(config, plan, f"{name}.attn")
            if i < config.num_dense_layers:
                ffn = FFN(plan, f"{name}.ffn", "ffn", D, config.intermediate_size)
                blocks.append(DenseBlock(plan, name, attn, ffn, D, eps, gain))
            else:
                moe = _moe(config, plan, f"{name}.moe", residual)
                blocks.append(MoEBlock(plan, name, attn, moe, D, eps, gain))
        self.layers = nn.ModuleList(blocks)
        self.norm = None if post else RMSNorm(plan, "norm", D, eps)
        heads = 1 + config.num_mtp_layers  # one head, used so many times
        self.lm_head = Linear(plan.gemm("lm_head", "lm_head", D, config.vocab_size, rows_per_token=heads))
        depths: list[Block] = []
        for name in (f"mtp.{k}" for k in range(config.num_mtp_layers)):
            attn, moe = _mla(config, plan, f"{name}.attn"), _moe(config, plan, f"{name}.moe", residual)
            depths.append(MTPBlock(plan, name, attn, moe, D, eps, gain))
        self.mtp = nn.ModuleList(depths)
        self._blocks = [(f"layers.{i}", block) for i, block in enumerate(blocks)]
        self._blocks += [(f"mtp.{k}", block) for k, block in enumerate(depths)]
        self.end_of_text: int | None = None
        """The token that documents begin with, if attention is to stay within them (`models.documents`); None: it goes
        over whole sequences."""
        self.context: ContextSplit | None = None
        """The ranks that sequences are cut over (`split_sequences`); None: they are whole."""
        self.scores: ContextSplit | None = None
        """Of these, those that compute losses of different positions: all, but for `tensor`."""
        self.tensor: TensorSplit | None = None
        """The ranks that heads and vocabulary are cut over (`split_weights`); None: this process has all."""
        self.slots: Slots | None = None
        """Where tokens travel to experts in fixed slots: what the layers share; None: they do not."""
        self.pipeline: Pipeline | None = None
        """The stages that this process computes (`take_stages`); None: it computes all blocks."""
        self.mtp_loss_weight = config.mtp_loss_weight
        self.router_bias_update_rate = config.router_bias_update_rate
        """Both may change along a run."""
        self.loss_scale: Tensor | None = None
        """What the losses are about to be multiplied by before their backward pass, 0-d FP32, if that is far from 1."""
        self._mtp_targets: Tensor | None = None  # [K], see `expect`
        plan.finish()

    def forward(self, tokens: Tensor) -> Losses:
        """tokens [B, S + 1] int64 -> the losses of predicting each next token, and with MTP the ones after it.

        With `context` of the positions of this rank: the mean over the group's ranks is the loss of the sequences.
        """
        return self._computed(tokens, (), None)[1]

    def forward_stage(self, stage: Stage, tokens: Tensor, *carried: Tensor) -> tuple[tuple[Tensor, ...], Losses]:
        """As `forward`, the part of a stage. carried: of the stage before, none on the first: the stream [B, S, D], and
        with MTP the embedded tokens [B, S + 1, D]; with `context` of its positions, and of K tokens behind them.

        Returns what this stage makes of that for the next one, and its losses: zero for what others have. Their sums
        over the stages are the model's.
        """
        return self._computed(tokens, carried, stage)

    def carried_shapes(self, B: int, S: int) -> list[tuple[int, int, int]]:
        """Shapes of what stages pass on, in the residual stream's dtype; see `forward_stage`."""
        D, depths, ranks = self.config.hidden_size, len(self.mtp), 1 if self.context is None else self.context.size
        further = 1 if self.context is None else depths
        return [(B, S // ranks, D)] + [(B, S // ranks + further, D)] * (depths > 0)

    def _computed(
        self, tokens: Tensor, carried: tuple[Tensor, ...], stage: Stage | None
    ) -> tuple[tuple[Tensor, ...], Losses]:
        S = tokens.shape[1] - 1
        if len(self.mtp) >= S:
            raise UserError(
                f"model.num_mtp_layers={len(self.mtp)}: too deep for a sequence of {S} positions; set at most {S - 1}"
            )
        refresh_weights(self)
        own = S if self.context is None else S // self.context.size
        if carried:
            h_BSD, embedded = carried[0], carried[-1]
        else:
            further = max(1, len(self.mtp))
            embedded = self.embed(tokens if self.context is None else self.context.window(tokens, further))
            h_BSD = tokens_ahead(embedded, 0, own)
        rope_2SP = self._rope(S, tokens.device)
        documents = None if self.end_of_text is None else documents_of(tokens, self.end_of_text)
        masked = () if documents is None else self._mask(documents[:, :S])
        h_BSD, balance, loads = self._main(h_BSD, rope_2SP, masked, stage)
        is_last = stage is None or stage.is_last
        mtp = lm = torch.zeros((), dtype=torch.float32, device=h_BSD.device)
        if is_last:
            lm = self.loss(h_BSD, self.scored(targets_ahead(tokens, 1)))
        for k, block in enumerate(self.mtp, start=1):
            if not is_last:
                loads.append(self._no_load(h_BSD.device))
                continue
            ahead, targets = tokens_ahead(embedded, k, own), targets_ahead(tokens, k + 1)
            if documents is not None:
                ahead, targets = self._within(documents, k, ahead, targets)
            mean = None  # number of targets of a microbatch whose loss has weight 1
            if documents is not None and self._mtp_targets is not None:
                mean = self._mtp_targets[k - 1]
            elif self.scores is not None:
                mean = (targets != IGNORED).sum().clamp(min=1) / self.scores.size
            targets = self.scored(targets)
            h_BSD, loss, load_E = block(h_BSD, rope_2SP, ahead, *masked)
            balance = balance + loss
            loads.append(load_E)
            loss = self.loss(h_BSD, targets) / len(self.mtp)
            mtp = mtp + (loss if mean is None else loss * ((targets != IGNORED).sum() / mean))
        load = torch.stack(loads) if loads else tokens.new_zeros(0, self.config.num_experts)
        total = lm + self.mtp_loss_weight * mtp + balance
        made = () if is_last else (h_BSD,) if carried or not len(self.mtp) else (h_BSD, embedded)
        return made, Losses(lm, mtp, balance, load, total)

    @torch.no_grad()
    def mtp_targets(self, tokens: Tensor) -> Tensor | None:
        """Numbers of MTP targets by depth [depths] int64 in tokens [B, S + 1] int64; None if every sequence has as
        many."""
        if self.end_of_text is None or not self.mtp:
            return None
        S, documents = tokens.shape[1] - 1, documents_of(tokens, self.end_of_text)
        counts = [
            (targets_ahead(tokens, k + 1).masked_fill(beyond(documents, k, S), IGNORED) != IGNORED).sum()
            for k in range(1, len(self.mtp) + 1)
        ]
        return torch.stack(counts)

    @torch.no_grad()
    def expect(self, targets: Tensor, microbatches: int) -> None:
        """`mtp_targets` of all that a step is about to read, and in how many equal microbatches, of all ranks; one that
        ranks of a context group share counts on each.

        Within documents, sequences have different numbers of MTP targets. From here on the MTP losses of microbatches
        are weighted by theirs, so that their mean is that over all targets of the step, however it is cut.
        """
        if self.pipeline is not None and not self.pipeline.has_last:
            return
        mean = targets.clamp(min=1).to(self.lm_head.weight.device) / microbatches
        # in place: a recorded graph reads it where it was
        self._mtp_targets = mean if self._mtp_targets is None else self._mtp_targets.copy_(mean)

    def hidden(self, tokens: Tensor, carried: Tensor | None = None, stage: Stage | None = None) -> Tensor:
        """tokens [B, S] int64 -> state after the final norm [B, S, D], in the residual stream's dtype; with `context`
        at this rank's positions (`own`). stage: compute this one alone, of the stream that the one before `carried`;
        of stages before the last the stream behind their blocks."""
        refresh_weights(self)
        masked = () if self.end_of_text is None else self._mask(documents_of(tokens, self.end_of_text))
        h_BSD = self.embed(self.own(tokens)) if carried is None else carried
        return self._main(h_BSD, self._rope(tokens.shape[1], tokens.device), masked, stage)[0]

    def own(self, x: Tensor) -> Tensor:
        """x [B, S, ...] at this rank's positions: all, without `context`."""
        return x if self.context is None else self.context.own(x).contiguous()

    def scored(self, x: Tensor) -> Tensor:
        """x [B, S, ...] at the positions that `loss` is of: `own`, with `tensor` those of its group."""
        return x if self.scores is None else self.scores.own(x).contiguous()

    def split_sequences(self, positions: ContextSplit, context: ContextSplit | None) -> None:
        """From now on each rank of `positions` computes its part of every sequence. context: those of them that
        exchange heads; all, but for `split_weights`. UserError if heads do not go round."""
        if self.config.num_heads % positions.size:
            raise UserError(
                f"parallel.context * parallel.tensor={positions.size}: it does not divide "
                f"model.num_heads={self.config.num_heads}; set a divisor"
            )
        self.context, self.scores = positions, context
        for _, block in self._blocks:
            block.attn.context = context
            if context is not None:
                block.attn.max_logits.heads = context.own_heads(self.config.num_heads)
            if isinstance(block, MoEBlock):
                block.moe.gate.context = positions

    def split_weights(self, part: nn.Module, tensor: TensorSplit) -> None:
        """Tensor parallelism: from now on this process has its heads, or its words, of one of the `parts`. After its
        weights are drawn, before the arena is made; with `split_sequences`."""
        self.tensor = tensor
        if isinstance(part, Block):
            part.attn.split(tensor)
        elif isinstance(part, Embedding):
            part.split(tensor)
        elif part is self.lm_head:
            tensor.keep(part, 0)

    def take_stages(self, pipeline: Pipeline) -> None:
        """Pipeline parallelism: from now on this process computes its stages of `pipeline`, and others the rest."""
        self.pipeline = pipeline

    def here(self, part: nn.Module) -> bool:
        """Whether one of the `parts` is computed here."""
        if self.pipeline is None:
            return True
        if part is self.embed:
            return self.pipeline.has_first
        own = (part is block for stage in self.pipeline.stages for block in self.layers[stage.begin : stage.end])
        return any(own) or (self.pipeline.has_last and part not in self.layers)

    def blocks_of(self, stage: Stage) -> list[nn.Module]:
        """Its blocks; of the last one MTP's, too."""
        return [*self.layers[stage.begin : stage.end], *(self.mtp if stage.is_last else ())]

    def logits(self, h_BSD: Tensor) -> Tensor:
        """State after a final norm, the main model's or an MTP depth's, [B, S, D] -> logits [B, S, V]."""
        return self.lm_head(h_BSD)

    def loss(self, h_BSD: Tensor, target_BS: Tensor) -> Tensor:
        """Mean cross entropy of `logits(h)`, nats, 0-d FP32; target [B, S] int64, as `scored`. Never makes all of
        the logits."""
        return linear_cross_entropy(h_BSD, self.lm_head, target_BS, self.loss_scale, self.tensor)

    def iter_blocks(self) -> list[tuple[str, Block]]:
        """All blocks by name, the main model's and then MTP's: the one list for whatever treats block by block."""
        return list(self._blocks)

    def init_weights(self, seed: int) -> None:
        """Weights ~ N(0, init_std), gains 1, of post-norms 1 / sqrt(num_layers), router biases 0.

        Equal seeds give equal weights on one kind of device.
        """
        generator = torch.Generator(device=self.lm_head.weight.device).manual_seed(seed)
        for part in self.parts():
            self.init_part(part, generator)

    def parts(self) -> list[nn.Module]:
        """Blocks and what stands beside them, in the order in which their weights are drawn."""
        last = [] if self.norm is None else [self.norm]
        return [self.embed, *self.layers, *last, self.lm_head, *self.mtp]

    @torch.no_grad()
    def init_part(self, part: nn.Module, generator: torch.Generator) -> None:
        """`init_weights` of one of the `parts`."""
        for parameter in part.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.init_std, generator=generator)
        for module in part.modules():
            if isinstance(module, RMSNorm) and module.weight is not None and module.initial is not None:
                module.weight.fill_(module.initial)
            if isinstance(module, Gate) and module.bias is not None:
                module.bias.zero_()

    def no_decay(self) -> set[str]:
        """Names of the parameters without weight decay: gains of norms, embedding, routers."""
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.dim() == 1 or name == "embed.weight" or name.endswith(".router.weight")
        }

    @property
    def router_bias(self) -> list[Tensor]:
        """Selection biases [E] FP32 (buffers), one a block with experts; none with softmax scoring."""
        gates = (block.moe.gate for _, block in self.iter_blocks() if isinstance(block, MoEBlock))
        return [gate.bias for gate in gates if gate.bias is not None]

    @torch.no_grad()
    def update_router_bias(self, load: Tensor, ok: Tensor) -> None:
        """b -= gamma sign(load - mean load), or less its mean, where `ok` (0-d bool, on the device); see `router`.

        load [blocks with experts, E]: of the whole step, over all microbatches and ranks.
        """
        sign = torch.sign(load - load.double().mean(1, keepdim=True)).float()
        if self.config.router_bias_zero_mean:
            sign = sign - sign.mean(1, keepdim=True)
        step = self.router_bias_update_rate * sign
        for bias_E, step_E in zip(self.router_bias, torch.where(ok, step, 0.0).unbind(), strict=False):
            bias_E.sub_(step_E)

    def _rope(self, length: int, device: torch.device) -> Tensor:
        config = self.config
        return rope_table(length, config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, device)

    def _mask(self, documents_BS: Tensor) -> tuple[None, Tensor]:
        """The last arguments of blocks: no cache, and what attention needs of documents, made once for all blocks."""
        attn = self._blocks[0][1].attn
        return None, document_mask(bounds_of(documents_BS), attn.core_dtype, sum(attn.q_widths), attn.kv_widths[1])

    def _within(self, documents: Tensor, k: int, ahead_BSD: Tensor, target_BS: Tensor) -> tuple[Tensor, Tensor]:
        """What depth k is given and has to predict, without what belongs to other documents."""
        out_BS = beyond(documents, k, target_BS.shape[1])
        if k > 1:  # one place on, the other document begins with that end-of-text token anyway
            end_1D = self.embed(documents.new_full((1,), self.end_of_text or 0, dtype=torch.int64))
            ahead_BSD = torch.where(self.own(out_BS)[..., None], end_1D, ahead_BSD)
        return ahead_BSD, target_BS.masked_fill(out_BS, IGNORED)

    def _main(
        self, h_BSD: Tensor, rope_2SP: Tensor, masked: tuple, stage: Stage | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """State after the final norm, or behind the stage's blocks; its summed balance losses; loads of all blocks with
        experts."""
        balance = torch.zeros((), dtype=torch.float32, device=h_BSD.device)
        loads = []
        for i, block in enumerate(self.layers):
            if stage is not None and not stage.begin <= i < stage.end:
                if isinstance(block, MoEBlock):
                    loads.append(self._no_load(h_BSD.device))
                continue
            h_BSD, loss, load_E = block(h_BSD, rope_2SP, *masked)
            if isinstance(block, MoEBlock):
                balance = balance + loss
                loads.append(load_E)
        return normed(h_BSD, self.norm) if stage is None or stage.is_last else h_BSD, balance, loads

    def _no_load(self, device: torch.device) -> Tensor:
        """Of a block that another stage computes."""
        return torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)


def _mla(config: ModelConfig, plan: Plan, name: str) -> MLA:
    return MLA(
        plan,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        softmax_scale=config.qk_scale * softmax_scale(config.qk_head_dim, config.rope_scaling),
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        qk_bound=qk_bound(config.qk_head_dim, config.rope_scaling) if config.qk_norm else None,
    )


def _moe(config: ModelConfig, plan: Plan, name: str, residual: torch.dtype) -> MoE:
    gate = Gate(
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_token,
        num_groups=config.num_expert_groups,
        num_groups_per_token=config.num_groups_per_token,
        scoring=config.router_scoring,
        normalize=config.norm_topk_prob,
        scaling_factor=config.routed_scaling_factor,
        balance_loss_weight=config.balance_loss_weight,
        force_balanced=config.force_balanced_routing,
    )
    return MoE(
        plan,
        name,
        gate,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_shared_experts=config.num_shared_experts,
        residual=residual,
        router_norm_eps=config.rms_norm_eps if config.norm_position is NormPosition.post else None,
    )
