"""KL control of a policy that sees images, on a tiny LLaVA."""

import pytest
import torch
from datasets import Dataset
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from support.oracle import centered, centering_sets, counting, kl_of_tokens
from support.tiny import SPECIALS, WORDS, build_model, build_tokenizer, build_trainer, logged, recording
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def build_processor() -> LlavaProcessor:
    from transformers import CLIPImageProcessorPil

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": 28, "width": 28}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


IMAGE_TOKEN = len(SPECIALS) + len(WORDS)


def build_llava() -> LlavaForConditionalGeneration:
    text = build_model(vocab_size=IMAGE_TOKEN + 1).config
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(config)


def build_pictures(rows: int = 8) -> Dataset:
    images = [Image.new("RGB", (28, 28), (30 * row, 255 - 30 * row, 7 * row)) for row in range(rows)]
    prompts = [[{"role": "user", "content": f"w{row} w{row + 1}"}] for row in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "image": images})


@pytest.mark.parametrize("statistic", ["k3", "full"])
@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer], ids=["grpo", "rloo"])
def test_images_reach_policy_and_reference(trainer_class, statistic, tmp_path):
    trainer = build_trainer(
        recording(trainer_class),
        tmp_path,
        model=build_llava(),
        dataset=build_pictures(),
        extras={"processing_class": build_processor()},
        kl_penalty_coef=0.3,
        kl_statistic=statistic,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        # A sampled image token would have no image, and TRL 1.14 does not prevent it.
        generation_kwargs={"suppress_tokens": [IMAGE_TOKEN]},
    )
    trainer.train()
    reference, coefs, largest = build_llava().eval(), logged(trainer, "klx/coef"), 0.0
    for loss in trainer.losses:
        batch, rows = trainer.generated[loss["rollout"]], loss["row"].tolist()
        assert "pixel_values" in batch
        kl, counts = kl_of_tokens(batch["policy"], reference, batch), counting(batch)
        expected = centered(kl, counts, coefs[loss["rollout"]], centering_sets("batch", len(kl), 2, rows))[rows]
        found = loss.get("klx_adjustment")
        if found is None:
            found = loss["advantages"] - batch["advantages"][rows].unsqueeze(1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        largest = max(largest, expected.abs().max().item())
    assert largest > 1e-3
    for generated, logged_kl in zip(trainer.generated, logged(trainer, "klx/kl"), strict=True):
        measured = kl_of_tokens(generated["policy"], reference, generated, statistic)
        assert logged_kl == pytest.approx(sum(map(sum, measured)) / len(measured), rel=1e-4, abs=1e-6)
    # Without the images the numbers would differ.
    blind = {**batch, "pixel_values": torch.zeros_like(batch["pixel_values"])}
    assert abs(sum(map(sum, kl_of_tokens(batch["policy"], reference, blind))) - sum(map(sum, kl))) > 1e-3
