"""Hunyuan-DiT's transformer and BERT on both backends against diffusers and transformers, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_hunyuan, tiny_bert
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_hunyuan import KINDS, tiny_dit

from qwenimg import backends
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry
from qwenimg.common.networks.denoisers import hunyuan_conditioning, hunyuan_dit
from qwenimg.common.networks.denoisers.hunyuan_dit import HunyuanConfig
from qwenimg.common.networks.encoders import bert, t5
from qwenimg.common.networks.encoders.bert import BertConfig
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.prompts import bert as bert_tokenizer

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((10, 6), 2, 1), ((12, 12), 77, 256), ((14, 22), 40, 100)]  # latents; words of BERT and of T5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_transformer(tmp_path: Path, kind: str, backend: str) -> None:
    """Texts that are padded and masked in the reference, as its pipeline does; BERT's padding is not given here."""
    model = tiny_dit(**KINDS[kind])
    model.save_pretrained(tmp_path)
    oracle_hunyuan.exact(model)
    config = read_config(hunyuan_dit.NETWORK, tmp_path)
    part = open_component(hunyuan_dit.NETWORK, tmp_path, config, "it")
    engine = backends.load(backend)
    ours, rng = engine.open(part.network, part.config, part.stored(FP32), FP32), np.random.default_rng(0)
    for (h, w), first, second in SHAPES:
        latents, *texts = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, h, w), (1, 77, 44), (1, 256, 56))
        )
        masks = [torch.tensor([[1] * n + [0] * (most - n)]) for n, most in ((first, 77), (second, 256))]
        from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

        grid = (h // 2, w // 2)
        rope = oracle_hunyuan.rotations(20, get_resize_crop_region_for_grid(grid, 32), grid)
        sizes = hunyuan_conditioning.size_row(8 * h, 8 * w) if config.sees_size else None
        given = (engine.array(texts[0][:, :first]), engine.array(texts[1]), second)
        condition = ours.condition(*given, grid, sizes)
        for time in (999, 500, 3):
            with torch.inference_mode():
                theirs = model(
                    torch.from_numpy(latents),
                    torch.tensor([float(time)]),
                    encoder_hidden_states=torch.from_numpy(texts[0]),
                    text_embedding_mask=masks[0],
                    encoder_hidden_states_t5=torch.from_numpy(texts[1]),
                    text_embedding_mask_t5=masks[1],
                    image_meta_size=torch.tensor([[1024.0, 1024.0, 8.0 * h, 8.0 * w, 0.0, 0.0]]),
                    style=torch.tensor([0]),
                    image_rotary_emb=rope,
                    return_dict=False,
                )[0][:, :4]
            made = ours.predict(engine.array(latents), hunyuan_conditioning.time_row(time), condition)
            error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
            print(f"{backend} {kind} {h}x{w}, {first} and {second} words, time {time}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_those_of_the_reference(tmp_path: Path, kind: str) -> None:
    model = tiny_dit(**KINDS[kind])
    model.save_pretrained(tmp_path)
    config, network = read_config(hunyuan_dit.NETWORK, tmp_path), hunyuan_dit.NETWORK
    stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {network.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
    assert {network.published(key) for key in network.manifest(config)} == stored.keys()


@pytest.mark.parametrize("name", ["hunyuan-dit", "hunyuan-dit-1.1"])
def test_parameters_of_the_published_models(name: str) -> None:
    from diffusers import HunyuanDiT2DModel

    model = registry.published(catalog.KNOWN[name])
    assert model is not None
    with torch.device("meta"):
        theirs = HunyuanDiT2DModel(
            in_channels=4, patch_size=2, hidden_size=1408, num_layers=40, mlp_ratio=4.3637,
            use_style_cond_and_image_meta_size=name != "hunyuan-dit",
        )  # fmt: skip
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    plan = model.checkpoint["transformer"].plan
    assert {hunyuan_dit.rename(key): shape for key, shape in shapes.items()} == dict(plan.shapes)
    assert plan.parameters == sum(int(np.prod(shape)) for shape in shapes.values())


def test_places() -> None:
    """Those of the reference in float64 for a square, and the authors' for any other picture."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    config = HunyuanConfig()
    for grid in ((64, 64), (38, 26), (1, 90), (80, 48), (33, 64)):
        crops = get_resize_crop_region_for_grid(grid, 32)
        made = hunyuan_conditioning.rope(config, grid)
        authors = oracle_hunyuan.rotations(88, crops, grid)
        for ours, theirs in zip(made, authors, strict=True):
            assert np.abs(ours.repeat(2, axis=1) - theirs.numpy()).max() < 1e-6
    for ours, theirs in zip(
        hunyuan_conditioning.rope(config, (64, 64)),
        get_2d_rotary_pos_embed(88, ((0, 0), (32, 32)), (64, 64)),
        strict=True,
    ):
        assert np.abs(ours.repeat(2, axis=1) - theirs.numpy()).max() < 1e-5  # its places are float32


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 60}, {"attention_head_dim": 90, "hidden_size": 1440}, {"cross_attention_dim_t5": 2047},
     {"num_layers": 7}, {"patch_size": 4}, {"learn_sigma": False}, {"mlp_ratio": 0.0}],
)  # fmt: skip
def test_configurations_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change)).split("_")[0]):
        replace(HunyuanConfig(), **change)


# BERT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("words", [2, 13, 77])
def test_bert(tmp_path: Path, backend: str, words: int) -> None:
    """The states of the words, which see no padding."""
    model: Any = tiny_bert.tiny_bert()
    model.save_pretrained(tmp_path)
    config = read_config(bert.NETWORK, tmp_path)
    part = open_component(bert.NETWORK, tmp_path, config, "it")
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    ids = np.random.default_rng(words).integers(0, config.vocab_size, 77).tolist()
    with torch.inference_mode():
        mask = torch.tensor([[1] * words + [0] * (77 - words)])
        theirs = model(torch.tensor([ids]), attention_mask=mask)[0][:, :words]
    error = relative_float32(np.asarray(engine.numpy(ours.encode(ids[:words]))), theirs.numpy())
    print(f"{backend} BERT, {words} words: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32 and theirs.std() > 0.1


def test_configurations_of_text_encoders(tmp_path: Path) -> None:
    """A BERT for masked words, mT5's model type, and others, which are refused."""
    data = BertConfig().__dict__ | {"model_type": "bert"}
    assert BertConfig(**bert.fields(data | {"pooler_fc_size": 768})) == BertConfig()
    for change in ({"model_type": "roberta"}, {"position_embedding_type": "relative_key"}, {"is_decoder": True}):
        with pytest.raises(ModelError, match=next(iter(change))):
            bert.fields(data | change)
    for change in ({"hidden_act": "relu"}, {"num_attention_heads": 5}, {"layer_norm_eps": 0.0}):
        with pytest.raises(ModelError, match=next(iter(change))):
            replace(BertConfig(), **change)
    xl = {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32}
    assert t5.T5Config(**t5.fields({"model_type": "mt5", **xl})).vocab_size == 250112
    assert bert.rename("bert.embeddings.LayerNorm.bias") == "embeddings.LayerNorm.bias"
    assert bert.rename("cls.predictions.bias") is None and bert.rename("bert.pooler.dense.bias") is None


# Tokenizers


@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
@pytest.mark.parametrize("layout", ["vocab.txt", "tokenizer.json"])
def test_bert_tokenizer(tmp_path: Path, layout: str, config: dict[str, object]) -> None:
    folder = tiny_bert.write_vocabulary(tmp_path / "a", **config)
    theirs = tiny_bert.hugging_face(folder)
    if layout == "tokenizer.json":
        theirs.save_pretrained(folder := tmp_path / "b")
        assert (folder / layout).exists()
    ours = bert_tokenizer.load(folder)
    texts = (
        "",
        "A red Circle",
        "背景 红色的猫star",
        "É café\tx\u200b",
        "[SEP] [mask] don't",
        "x" * 120,
        "stars, starring",
    )
    for text in texts:
        wanted = theirs(text, padding="max_length", max_length=12, truncation=True)
        tokens = ours.padded(text, 12)
        assert list(tokens.ids) == wanted.input_ids, text
        assert 12 - tokens.pads == sum(wanted.attention_mask)


def test_bert_tokenizers_that_are_refused(tmp_path: Path) -> None:
    folder = tiny_bert.write_vocabulary(tmp_path)
    good = (folder / "vocab.txt").read_text(encoding="utf-8")
    for text, why in ((good.replace("[SEP]", "[END]"), "SEP"), (good + "red\n", ""), ("\x00\xff", "no token")):
        (folder / "vocab.txt").write_text(text, encoding="utf-8")
        if why:
            with pytest.raises(ModelError, match=why):
                bert_tokenizer.load(folder)
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        bert_tokenizer.load(folder)
    tiny_bert.write_vocabulary(folder, do_lower_case="yes")
    with pytest.raises(ModelError, match="do_lower_case"):
        bert_tokenizer.load(folder)
    tiny_bert.write_vocabulary(folder, tokenizer_class="CLIPTokenizer")
    with pytest.raises(ModelError, match="BertTokenizer"):
        bert_tokenizer.load(folder)
    with pytest.raises(ModelError, match="embeddings"):
        tiny_bert.write_vocabulary(folder)
        bert_tokenizer.load(folder).check_vocabulary(5)


def test_mt5_tokenizer(tmp_path: Path) -> None:
    """A model with pieces for bytes: ids are SentencePiece's own, of characters without a piece too."""
    import io

    import sentencepiece
    from support.scripts import corpus
    from support.spiece_files import write_spiece

    from qwenimg.common.prompts import t5 as t5_tokenizer

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(150)), model_writer=made, vocab_size=1200, model_type="unigram", pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="nmt_nfkc", byte_fallback=True, hard_vocab_limit=False,
        user_defined_symbols=["▁<extra_id_1>", "▁<extra_id_0>"], num_threads=1, minloglevel=2,
        character_coverage=0.999,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ours = t5_tokenizer.load(write_spiece(tmp_path, made.getvalue()))
    assert ours.largest_id == theirs.get_piece_size() - 1
    texts = ("a red circle", "背景 𓀀 ꙮ x", "", "  many   blanks ", "é ﬁ Ⅷ")
    for text in texts:
        tokens = ours.padded(text, 40)
        wanted = [*theirs.encode(text), 1]
        assert list(tokens.ids) == wanted + [0] * (40 - len(wanted)), text
    assert any(theirs.is_byte(id) for text in texts for id in ours.words(text))
