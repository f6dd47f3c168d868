"""Cases of kernels by name: the features of a problem. Runners add the shape and the config.

The interpreter runs portable kernels on the CPU with blocks of 16 and 32. The emulator runs Hopper kernels on
the CPU with blocks of 64. A GPU runs all kernels at tuned shapes. Windows, chunks and first tokens end within
a block of their runner.
"""

from typing import Any

from flashtune.core.problem import Bias, Causal, KvDtype, KvScale

Fields = dict[str, Any]

# Of both passes, under the interpreter.
BOTH_PASSES: dict[str, Fields] = {
    "window": {"window_left": 11},
    "window_right": {"window_left": 21, "window_right": 6},
    "right_alone": {"window_right": 3},
    "wide_window": {"window_left": 2**31 - 1, "window_right": 2**31 - 1},
    "first_tokens": {"window_left": 9, "sink_tokens": 4},
    "chunk": {"chunk": 16},
    "odd_chunk": {"chunk": 13, "sink_tokens": 18},
    "prefix": {"prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "packed": {"packed": 75},
    "lengths": {"kv_lengths": True},
}
# Of the forward pass, under the interpreter.
FORWARD: dict[str, Fields] = {
    **BOTH_PASSES,
    "tree": {"tree": True},
    "tree, window": {"tree": True, "window_left": 11, "window_right": 9, "page_size": 16},
    "tree, packed": {"tree": True, "packed": 75, "sink_tokens": 4, "chunk": 16},
    "pages": {"page_size": 16},
    "pages_of_1": {"page_size": 1},
    "large_pages": {"page_size": 64},
    "int8_tensor": {"kv_dtype": KvDtype.INT8},
    "e4m3_head": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD},
    "int8_page": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE, "page_size": 32},
    "e4m3_page": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "page_size": 16},
}
# Combined with a block mask, under the interpreter with blocks of up to 64.
WITH_BLOCK_MASK: dict[str, Fields] = {
    "window": {"window_left": 70},
    "two_sided": {"window_left": 90, "window_right": 20},
    "first_tokens": {"window_left": 40, "sink_tokens": 70},
    "chunk": {"chunk": 100},
    "prefix": {"window_left": 40, "prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "lengths": {"kv_lengths": True},
    "dropout": {"dropout": True},
}

# Of Hopper kernels, emulated.
HOPPER: dict[str, tuple[Causal, Fields]] = {
    "softcap": (Causal.BOTTOM_RIGHT, {"softcap": True}),
    "softcap, full": (Causal.NONE, {"softcap": True, "window_left": 90}),
    "alibi": (Causal.BOTTOM_RIGHT, {"alibi": True}),
    "alibi, top left": (Causal.TOP_LEFT, {"alibi": True, "window_left": 150}),
    "alibi, full": (Causal.NONE, {"alibi": True}),
    "alibi, softcap, sinks": (Causal.BOTTOM_RIGHT, {"alibi": True, "softcap": True, "sinks": True}),
    "sinks": (Causal.BOTTOM_RIGHT, {"sinks": True}),
    "sinks, window": (Causal.BOTTOM_RIGHT, {"sinks": True, "window_left": 70}),
    "sinks, dropout": (Causal.NONE, {"sinks": True, "dropout": True}),
    "chunks": (Causal.BOTTOM_RIGHT, {"chunk": 128}),
    "uneven chunks": (Causal.TOP_LEFT, {"chunk": 100}),
    "chunks, full": (Causal.NONE, {"chunk": 90}),
    "chunks, window": (Causal.NONE, {"chunk": 150, "window_left": 60, "window_right": 30}),
    "first tokens, window": (Causal.BOTTOM_RIGHT, {"sink_tokens": 5, "window_left": 40}),
    "first tokens, full": (Causal.NONE, {"sink_tokens": 70, "window_left": 40}),
    "first tokens, chunks": (Causal.NONE, {"sink_tokens": 120, "chunk": 64, "window_right": 20}),
    "prefix": (Causal.BOTTOM_RIGHT, {"prefix": True}),
    "prefix, alibi": (Causal.TOP_LEFT, {"prefix": True, "alibi": True}),
    "prefix, window": (Causal.BOTTOM_RIGHT, {"prefix": True, "window_left": 50, "sink_tokens": 3}),
    "prefix, window, full": (Causal.NONE, {"prefix": True, "window_left": 50}),
    "prefix, chunks": (Causal.NONE, {"prefix": True, "chunk": 80}),
    "prefix without bounds": (Causal.NONE, {"prefix": True}),
    "tree": (Causal.BOTTOM_RIGHT, {"tree": True}),
    "tree, full": (Causal.NONE, {"tree": True}),
    "tree, chunks, alibi": (Causal.NONE, {"tree": True, "chunk": 100, "alibi": True, "sinks": True}),
    "tree, prefix, window": (Causal.BOTTOM_RIGHT, {"tree": True, "prefix": True, "window_left": 50}),
}
# Combined with a bias, a mask or a block mask of Hopper kernels, emulated.
HOPPER_MASKED: dict[str, tuple[Causal, Fields]] = {
    "alone": (Causal.NONE, {}),
    "causal": (Causal.BOTTOM_RIGHT, {}),
    "top left, window": (Causal.TOP_LEFT, {"window_left": 100}),
    "window": (Causal.NONE, {"window_left": 90, "window_right": 40}),
    "chunks, first tokens": (Causal.BOTTOM_RIGHT, {"chunk": 100, "sink_tokens": 5}),
    "alibi, softcap, sinks": (Causal.BOTTOM_RIGHT, {"alibi": True, "softcap": True, "sinks": True}),
    "alibi, dropout": (Causal.NONE, {"alibi": True, "dropout": True}),
}
HOPPER_BLOCKS: dict[str, tuple[Causal, Fields]] = {
    **HOPPER_MASKED,
    "lengths": (Causal.NONE, {"kv_lengths": True}),
    "causal, lengths": (Causal.BOTTOM_RIGHT, {"kv_lengths": True}),
}

# On a GPU, as shapes.
HEADS = "heads=8,kv_heads=2"
D64, D128 = f"{HEADS},seqlen=2048,head_dim=64", f"{HEADS},seqlen=2048,head_dim=128"
ODD = f"{HEADS},seqlen_q=777,seqlen_kv=3001,batch=2"
LATENT = "heads=16,kv_heads=1,head_dim=576,value_head_dim=512,mla"
CAPPED = "window=127,softcap,sinks"
PACKED = "causal,batch=12,packed=4000"
D256 = f"{HEADS},head_dim=256,causal"
DECODE = f"{HEADS},head_dim=128,causal"
E4M3_PAGES, INT8_HEADS = "kv_dtype=e4m3,kv_scale=page", "kv_dtype=int8,kv_scale=head"
TUNED = {
    "window": f"{D128},causal,batch=2,window=1024",
    "window, cap, sinks": f"{D128},causal,batch=2,{CAPPED}",
    "chunk": f"{D128},causal,batch=2,chunk=1000",
    "alibi and prefix": f"{D128},causal,batch=2,prefix,alibi",
    "additive": f"{D128},causal,batch=2,bias=additive",
    "boolean": f"{D128},batch=2,bias=boolean",
    "boolean, causal": f"{D128},causal,batch=2,bias=boolean",
    "boolean, d64, odd lengths": f"{ODD},head_dim=64,bias=boolean",
    "boolean, window and cap": f"{D128},causal,batch=2,window=1000,softcap,bias=boolean",
    "additive, odd lengths": f"{ODD},head_dim=128,bias=additive",
    "additive, d64 and window": f"{D64},causal,batch=2,window=1000,bias=additive",
    "blocks": f"{D128},batch=2,block_mask=128",
    "blocks, causal": f"{D128},causal,batch=2,block_mask=128",
    "blocks of groups": f"{D128},causal,batch=2,block_mask=128,block_lists=group",
    "blocks and lengths": f"{D128},causal,batch=2,window=1000,block_mask=128,kv_lengths",
    "small blocks": f"{D128},causal,batch=2,block_mask=64",
    "small blocks of groups": f"{D128},batch=2,block_mask=64,block_lists=group",
    "small blocks of groups and lengths": f"{D64},causal,batch=2,block_mask=64,block_lists=group,kv_lengths",
    "packed": f"{D128},causal,batch=12,packed=9000",
    # The search of a tile's sequence takes two steps.
    "packed, many sequences": f"{HEADS},seqlen=40,head_dim=128,causal,batch=300,packed=6000",
    "packed pages": f"{D128},{PACKED},page_size=16",
    "tree": f"{HEADS},seqlen_q=64,seqlen_kv=8192,head_dim=128,causal,batch=4,page_size=16,tree",
    "packed tree": f"{HEADS},seqlen_q=64,seqlen_kv=4096,head_dim=64,batch=9,packed=200,page_size=64,tree",
    "packed pages of 1": f"{D128},{PACKED},page_size=1",
    "packed pages of 4, padded": f"{HEADS},seqlen=2048,head_dim=96,value_head_dim=80,{PACKED},page_size=4",
    "pages of 1 in int8": f"{D128},causal,batch=2,page_size=1,{INT8_HEADS}",
    "packed pages scaled": f"{D128},{PACKED},page_size=16,kv_dtype=int8,kv_scale=page",
    "packed pages in e4m3, window": f"{D128},{PACKED},window=1000,page_size=16,kv_dtype=e4m3",
    "packed pages in int8, cap": f"{D64},{PACKED},softcap,page_size=64,{INT8_HEADS}",
    "packed pages of 1 in e4m3, sinks": f"{D128},{PACKED},sinks,page_size=1,kv_dtype=e4m3,kv_scale=head",
    "packed pages scaled, window, cap, sinks": f"{D128},{PACKED},{CAPPED},page_size=16,{E4M3_PAGES}",
    "pages in int8": f"{D128},causal,batch=2,page_size=64,{INT8_HEADS}",
    "pages in int8, fp16": f"{D128},dtype=fp16,causal,batch=2,page_size=128,kv_dtype=int8",
    "pages scaled, d64": f"{D64},causal,batch=2,window=1000,sink_tokens=4,page_size=8,{E4M3_PAGES}",
    "decode": f"{DECODE},seqlen_q=1,seqlen_kv=4096,batch=9",
    "decode pages": f"{DECODE},seqlen_q=1,seqlen_kv=8192,batch=9,page_size=64",
    "decode scaled": f"{DECODE},seqlen_q=2,seqlen_kv=4096,batch=2,page_size=16,{E4M3_PAGES}",
    "decode window": f"{D256},seqlen_q=1,seqlen_kv=8192,batch=16,window=4095,softcap,page_size=16",
    "latent": f"{LATENT},seqlen_q=1,seqlen_kv=4096,causal,batch=2,page_size=64",
}

# Of both passes, verified in plain torch with blocks of 16.
PLAIN_MASKS: dict[str, Fields] = {
    "window": {"window_left": 24},
    "window of both sides": {"window_left": 7, "window_right": 12, "causal": Causal.NONE},
    "window aligned top-left": {"window_left": 40, "causal": Causal.TOP_LEFT},
    "window of one key": {"window_left": 0},
    "first tokens": {"window_left": 20, "sink_tokens": 3},
    "chunk": {"chunk": 32},
    "chunk both ways": {"chunk": 24, "causal": Causal.NONE},
    "chunk and first tokens": {"chunk": 32, "sink_tokens": 5, "window_left": 20},
    "prefix": {"prefix": True},
    "prefix and window": {"prefix": True, "window_left": 16},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "alibi both ways": {"alibi": True, "causal": Causal.NONE},
    "bias": {"bias": Bias.ADDITIVE, "causal": Causal.NONE},
    "bias under a cap": {"bias": Bias.ADDITIVE, "softcap": True},
    "mask": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "sinks, cap, window": {"sinks": True, "softcap": True, "window_left": 20},
    "packed": {"packed": 1000},
    "packed both ways": {"packed": 1000, "causal": Causal.NONE},
    "packed window": {"packed": 1000, "window_left": 12, "alibi": True},
    "packed with lengths": {"packed": 1000, "kv_lengths": True},
    "lengths": {"kv_lengths": True},
}
