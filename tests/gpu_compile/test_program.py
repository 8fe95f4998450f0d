"""The reader of compiled programs, on a program and thunks written by hand. (No plug-in needed.)"""

from tests.gpu_compile.program import aliased_outputs, instructions, launched_singly

HLO = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }

%fused (p: bf16[64,8]) -> f32[8,64] {
  %p = bf16[64,8]{1,0} parameter(0)
  %convert.1 = f32[64,8]{1,0} convert(%p)
  ROOT %transpose.1 = f32[8,64]{1,0} transpose(%convert.1), dimensions={1,0}
}

%slice-fusion (q: bf16[64,8]) -> bf16[8,8] {
  %q = bf16[64,8]{1,0} parameter(0)
  %slice.1 = bf16[8,8]{1,0} slice(%q), slice={[0:8], [0:8]}
  ROOT %call.2 = bf16[8,8]{1,0} custom-call(%slice.1), custom_call_target="k"
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (t: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %t = (s32[], f32[4,4]{1,0}) parameter(0)
  %copy.3 = f32[4,4]{1,0} copy(%t), metadata={op_name="jit(f)/while/body/kv_write/copy"}
  ROOT %r = (s32[], /*index=1*/f32[4,4]{1,0}) tuple(%copy.3)
}

ENTRY %main (w: bf16[64,8]) -> f32[8,64] {
  %w = bf16[64,8]{1,0} parameter(0)
  %fusion.1 = f32[8,64]{1,0} fusion(%w), kind=kLoop, calls=%fused
  %fusion.2 = bf16[8,8]{1,0} fusion(%w), kind=kCustom, calls=%slice-fusion
  %call.1 = (bf16[2,3]{1,0}, f32[]) custom-call(%w), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
  ROOT %reduce.1 = f32[8]{0} reduce(%fusion.1), to_apply=%add
}
"""

THUNKS = """000: kCommandBuffer [source | next=001 (1)]
    001: kCustomCall   [source] kCustomCall
002: kWhile         [prev=000 (1) | sink]
condition:
    003: kCustomCall   [source] kCustomCall
  body:
    000: kCommandBuffer [source]
        004: kConditional  [source]
          true_branch:
            005: kCustomCall   [source] kCustomCall
    006: kCustomCall    [source] kCustomCall
"""


def test_instructions_that_run_with_what_they_give():
    found = instructions(HLO)
    assert [i.opcode for i in found] == (
        ["custom-call", "parameter", "copy", "tuple", "parameter", "fusion", "fusion", "custom-call", "reduce"]
    )
    opcodes = {i.opcode: i for i in found}
    assert [i.shapes for i in found if i.opcode == "fusion"] == [((8, 64),), ((8, 8),)]
    assert opcodes["custom-call"].shapes == ((2, 3), ())
    assert opcodes["custom-call"].in_place
    assert not opcodes["copy"].in_place
    assert opcodes["copy"].largest == 16
    assert opcodes["copy"].scope == "jit(f)/while/body/kv_write/copy"


def test_aliased_outputs_are_counted():
    assert aliased_outputs(HLO) == 2


def test_custom_calls_outside_of_command_buffers_are_counted():
    assert launched_singly(THUNKS) == 2
