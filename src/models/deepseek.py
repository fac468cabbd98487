"""The model: embedding, blocks, final norm, head, and multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

`forward(tokens [B, S + 1])` returns the losses of one microbatch. `hidden` and `loss` are its parts, for evaluation;
`logits` is for generation. The precision plan is filled in while the model is built: one row per GEMM, named by its
module path.

Build on the meta device, then call `to_empty(device=...)`, `init_weights(seed)`, `precision.bind(...)`.

Legend: B batch, S sequence, D hidden, V vocabulary, E experts, P pairs of rotary dimensions.
"""

import torch
from torch import Tensor, nn

from models.block import Block, DenseBlock, MoEBlock
from models.config import ModelConfig, NormPosition
from models.context import ContextSplit
from models.documents import beyond, bounds_of, documents_of
from models.layers import FFN, Embedding, RMSNorm, normed, rope_table
from models.loss import Losses, targets_ahead
from models.mla import MLA
from models.moe import MoE
from models.mtp import MTPBlock, tokens_ahead
from models.router import Gate
from models.slots import Slots
from models.stage import Pipeline, Stage
from models.tensor import TensorSplit
from precision import IGNORED, Kurtosis, Linear, Plan, Xielu, document_mask, linear_cross_entropy, refresh_weights
from precision.errors import UserError
from precision.head import bounds_gradient


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
            attn = MLA(config, plan, f"{name}.attn")
            if i < config.num_dense_layers:
                ffn = FFN(plan, f"{name}.ffn", "ffn", D, config.intermediate_size, config.activation)
                blocks.append(DenseBlock(plan, name, attn, ffn, D, eps, gain))
            else:
                moe = MoE(config, plan, f"{name}.moe", residual)
                blocks.append(MoEBlock(plan, name, attn, moe, D, eps, gain))
        self.layers = nn.ModuleList(blocks)
        self.norm = None if post else RMSNorm(plan, "norm", D, eps)
        heads = 1 + config.num_mtp_layers  # uses of the one head
        self.lm_head = Linear(plan.gemm("lm_head", "lm_head", D, config.vocab_size, rows_per_token=heads))
        if self.lm_head.grad_slot is not None:
            self.lm_head.grad_slot.scales_itself = bounds_gradient(self.lm_head.recipe)
        depths: list[Block] = []
        for name in (f"mtp.{k}" for k in range(config.num_mtp_layers)):
            attn, moe = MLA(config, plan, f"{name}.attn"), MoE(config, plan, f"{name}.moe", residual)
            depths.append(MTPBlock(plan, name, attn, moe, D, eps, gain))
        self.mtp = nn.ModuleList(depths)
        self._blocks = [(f"layers.{i}", block) for i, block in enumerate(blocks)]
        self._blocks += [(f"mtp.{k}", block) for k, block in enumerate(depths)]
        self.end_of_text: int | None = None
        """First token of each document, if attention stays within documents (`models.documents`); None: it spans whole
        sequences."""
        self.context: ContextSplit | None = None
        """Ranks that share each sequence (`split_sequences`); None: sequences are whole."""
        self.scores: ContextSplit | None = None
        """Those of them that compute losses of different positions: all, except with `tensor`."""
        self.tensor: TensorSplit | None = None
        """Ranks that share heads and vocabulary (`split_weights`); None: this process has all."""
        self.slots: Slots | None = None
        """State shared by the layers where tokens travel to experts in fixed slots; None: they do not."""
        self.pipeline: Pipeline | None = None
        """Stages that this process computes (pipeline parallelism); None: it computes all blocks."""
        self.mtp_loss_weight = config.mtp_loss_weight
        self.router_bias_update_rate = config.router_bias_update_rate
        """This rate and `mtp_loss_weight` may change along a run."""
        self.loss_scale: Tensor | None = None
        """Factor of the losses before their backward pass, 0-d FP32, if it is far from 1."""
        self._mtp_targets: Tensor | None = None  # [K], see `expect`
        plan.finish()

    def forward(self, tokens: Tensor) -> Losses:
        """Return the losses of predicting each next token of tokens [B, S + 1] int64, and with MTP the tokens after it.

        With `context` the losses cover this rank's positions: their mean over the group is the loss of the sequences.
        """
        return self._computed(tokens, (), None)[1]

    def forward_stage(self, stage: Stage, tokens: Tensor, *carried: Tensor) -> tuple[tuple[Tensor, ...], Losses]:
        """Compute one stage's part of `forward`. carried: outputs of the previous stage, none for the first: the stream
        [B, S, D], and with MTP the embedded tokens [B, S + 1, D]; with `context` at its positions, and K tokens after
        them.

        Returns the inputs of the next stage, and this stage's losses, which are zero for other stages' parts. Their
        sums over the stages are the model's.
        """
        return self._computed(tokens, carried, stage)

    def carried_shapes(self, B: int, S: int) -> list[tuple[int, int, int]]:
        """Return the shapes that stages pass on, in the residual stream's dtype; see `forward_stage`."""
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
            h_BSD, loss, load_E = block(h_BSD, rope_2SP, ahead, *masked)
            balance = balance + loss
            loads.append(load_E)
            mtp = mtp + self._mtp_loss(h_BSD, targets, k, documents is not None)
        load = torch.stack(loads) if loads else tokens.new_zeros(0, self.config.num_experts)
        total = lm + self.mtp_loss_weight * mtp + balance
        made = () if is_last else (h_BSD,) if carried or not len(self.mtp) else (h_BSD, embedded)
        return made, Losses(lm, mtp, balance, load, total)

    @torch.no_grad()
    def mtp_targets(self, tokens: Tensor) -> Tensor | None:
        """Return the number of MTP targets by depth, [depths] int64, in tokens [B, S + 1] int64; None if all sequences
        have the same number."""
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
        """Set `mtp_targets` of the whole step and its number of equal microbatches, over all ranks; a microbatch that
        the ranks of a context group share counts on each.

        Within documents, sequences have different numbers of MTP targets. From now on the MTP losses of microbatches
        are weighted by theirs, so that their mean is the mean over all targets of the step, however it is split.
        """
        if self.pipeline is not None and not self.pipeline.has_last:
            return
        mean = targets.clamp(min=1).to(self.lm_head.weight.device) / microbatches
        # in place: a recorded graph reads this memory
        self._mtp_targets = mean if self._mtp_targets is None else self._mtp_targets.copy_(mean)

    def hidden(self, tokens: Tensor, carried: Tensor | None = None, stage: Stage | None = None) -> Tensor:
        """Return the state after the final norm [B, S, D] of tokens [B, S] int64, in the residual stream's dtype; with
        `context` at this rank's positions (`own`).

        stage: compute this stage alone, from the stream `carried` by the previous one; stages before the last return
        the stream after their blocks.
        """
        refresh_weights(self)
        masked = () if self.end_of_text is None else self._mask(documents_of(tokens, self.end_of_text))
        h_BSD = self.embed(self.own(tokens)) if carried is None else carried
        return self._main(h_BSD, self._rope(tokens.shape[1], tokens.device), masked, stage)[0]

    def own(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] at this rank's positions; all of them without `context`."""
        return x if self.context is None else self.context.own(x).contiguous()

    def scored(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] at the positions that `loss` covers: `own`, or with `tensor` those of its group."""
        return x if self.scores is None else self.scores.own(x).contiguous()

    def split_sequences(self, positions: ContextSplit, context: ContextSplit | None) -> None:
        """Let each rank of `positions` compute its part of every sequence. context: those of its ranks that exchange
        heads; all, except with `split_weights`. UserError if the heads do not divide evenly."""
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
            for module in block.modules():
                if isinstance(module, Gate):
                    module.context = positions
                if isinstance(module, Kurtosis):
                    module.sequence_group = positions.name

    def split_weights(self, part: nn.Module, tensor: TensorSplit) -> None:
        """Keep this process's heads, or words, of one of the `parts` (tensor parallelism). Call it after the part's
        weights are drawn and before the arena is made; with `split_sequences`."""
        self.tensor = tensor
        if isinstance(part, Block):
            part.attn.split(tensor)
        elif isinstance(part, Embedding):
            part.split(tensor)
        elif part is self.lm_head:
            tensor.keep(part, 0)

    def here(self, part: nn.Module) -> bool:
        """Return whether this process computes one of the `parts`."""
        if self.pipeline is None:
            return True
        if part is self.embed:
            return self.pipeline.has_first
        own = (part is block for stage in self.pipeline.stages for block in self.layers[stage.begin : stage.end])
        return any(own) or (self.pipeline.has_last and part not in self.layers)

    def blocks_of(self, stage: Stage) -> list[nn.Module]:
        """Return the stage's blocks; for the last stage MTP's, too."""
        return [*self.layers[stage.begin : stage.end], *(self.mtp if stage.is_last else ())]

    def logits(self, h_BSD: Tensor) -> Tensor:
        """Return the logits [B, S, V] of a state after a final norm [B, S, D], the main model's or an MTP depth's."""
        return self.lm_head(h_BSD)

    def loss(self, h_BSD: Tensor, target_BS: Tensor) -> Tensor:
        """Return the mean cross entropy of `logits(h)` in nats, 0-d FP32, without materialising all logits. target [B,
        S] int64, as in `scored`."""
        return linear_cross_entropy(h_BSD, self.lm_head, target_BS, self.loss_scale, self.tensor)

    def iter_blocks(self) -> list[tuple[str, Block]]:
        """Return all blocks by name, the main model's, then MTP's. Everything that works per block uses this list."""
        return list(self._blocks)

    def init_weights(self, seed: int) -> None:
        """Draw weights ~ N(0, init_std); set gains to 1, of post-norms to 1 / sqrt(num_layers), and router biases to 0.

        Equal seeds give equal weights on one kind of device.
        """
        generator = torch.Generator(device=self.lm_head.weight.device).manual_seed(seed)
        for part in self.parts():
            self.init_part(part, generator)

    def parts(self) -> list[nn.Module]:
        """Return the blocks and the modules outside them, in the order in which their weights are drawn."""
        last = [] if self.norm is None else [self.norm]
        return [self.embed, *self.layers, *last, self.lm_head, *self.mtp]

    @torch.no_grad()
    def init_part(self, part: nn.Module, generator: torch.Generator) -> None:
        """Apply `init_weights` to one of the `parts`."""
        for parameter in part.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.init_std, generator=generator)
        for module in part.modules():
            if isinstance(module, RMSNorm) and module.weight is not None and module.initial is not None:
                module.weight.fill_(module.initial)
            if isinstance(module, Xielu):
                module.reset()
            if isinstance(module, Gate) and module.bias is not None:
                module.bias.zero_()

    def no_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay: gains of norms, activations, embedding,
        routers."""
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.dim() == 1 or name == "embed.weight" or name.endswith(".router.weight")
        }

    @property
    def router_bias(self) -> list[Tensor]:
        """Return the selection biases [E] FP32 (buffers), one per block with experts; none with softmax scoring."""
        gates = (block.moe.gate for _, block in self.iter_blocks() if isinstance(block, MoEBlock))
        return [gate.bias for gate in gates if gate.bias is not None]

    @torch.no_grad()
    def update_router_bias(self, load: Tensor, ok: Tensor) -> None:
        """Apply b -= gamma sign(load - mean load), or this less its mean, where `ok` (0-d bool, on the device); see
        `router`.

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
        """Return the last arguments of blocks: no cache, and the document mask, made once for all blocks."""
        attn = self._blocks[0][1].attn
        dtype = min((block.attn.core_dtype for _, block in self._blocks), key=lambda each: each.itemsize)
        return None, document_mask(bounds_of(documents_BS), dtype, sum(attn.q_widths), attn.kv_widths[1])

    def _within(self, documents: Tensor, k: int, ahead_BSD: Tensor, target_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and the targets of depth k, without tokens of other documents."""
        out_BS = beyond(documents, k, target_BS.shape[1])
        if k > 1:  # at k = 1 the other document begins with that end-of-text token anyway
            end_1D = self.embed(documents.new_full((1,), self.end_of_text or 0, dtype=torch.int64))
            ahead_BSD = torch.where(self.own(out_BS)[..., None], end_1D, ahead_BSD)
        return ahead_BSD, target_BS.masked_fill(out_BS, IGNORED)

    def _mtp_loss(self, h_BSD: Tensor, target_BS: Tensor, k: int, within_documents: bool) -> Tensor:
        """Return depth k's part of the MTP loss, weighted by its number of targets if parts of a step differ in it."""
        own_BS = self.scored(target_BS)
        loss = self.loss(h_BSD, own_BS) / len(self.mtp)
        if within_documents and self._mtp_targets is not None:
            mean = self._mtp_targets[k - 1]
        elif self.scores is not None:
            mean = (target_BS != IGNORED).sum().clamp(min=1) / self.scores.size
        else:
            return loss
        return loss * ((own_BS != IGNORED).sum() / mean)

    def _main(
        self, h_BSD: Tensor, rope_2SP: Tensor, masked: tuple, stage: Stage | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the state after the final norm, or after the stage's blocks; its summed balance losses; loads of all
        blocks with experts."""
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
        """Return the load of a block that another stage computes."""
        return torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
