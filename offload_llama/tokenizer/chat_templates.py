"""Chat templates for Meta's own model files, which hold none."""

from __future__ import annotations

from collections.abc import Mapping

# Source: Llama 2's prompt format (model card): the system text stands inside the first user
# turn, turns alternate, and each pair is a text of its own with begin and end tokens.
LLAMA_2 = """
{%- set ns = namespace(system='', expected='user') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- if not loop.first -%}
      {{- raise_exception('a system message must come first') -}}
    {%- endif -%}
    {%- set ns.system = '<<SYS>>\\n' ~ message.content ~ '\\n<</SYS>>\\n\\n' -%}
    {%- if loop.last -%}
      {{- raise_exception('a system message needs a user message after it') -}}
    {%- endif -%}
  {%- elif message.role != ns.expected -%}
    {{- raise_exception('user and assistant must take turns, the user first') -}}
  {%- elif message.role == 'user' -%}
    {{- bos_token ~ '[INST] ' ~ (ns.system ~ message.content) | trim ~ ' [/INST]' -}}
    {%- set ns.system = '' -%}
    {%- set ns.expected = 'assistant' -%}
  {%- else -%}
    {{- ' ' ~ message.content | trim ~ ' ' ~ eos_token -}}
    {%- set ns.expected = 'user' -%}
  {%- endif -%}
{%- endfor -%}
"""

# Source: Llama 3's prompt format (model card).
LLAMA_3 = """
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
  {{- message.content | trim ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

BUILT_IN: Mapping[str, str] = {"llama-2": LLAMA_2, "llama-3": LLAMA_3}

# A vocabulary with all of these as control tokens was made for that format and no other.
LLAMA_3_MARKERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
