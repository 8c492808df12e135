group_norm 256x512x56x56 groups=32 device=cuda | rows_split_forward_f32_4x22 16384x256 cluster=2 kept=1+3
group_norm 256x512x56x56 groups=32 dir=bwd device=cuda | rows_split_backward_f32_4x9 49152x128 cluster=6 kept=1+8 + gradients
group_norm 128x256x28x28 groups=32 device=cuda | rows_block_forward_f32_4x7 4096x224 parts=1 kept=1+0
group_norm 128x256x28x28 groups=32 dir=bwd device=cuda | rows_block_backward_f32_4x5 4096x128 parts=1 kept=1+8 + gradients
group_norm 256x512x56x56 groups=32 dtype=bf16 layout=nhwc device=cuda | columns_split_forward_bf16_8x16 8192x256 cluster=8 kept=1+9
group_norm 256x512x56x56 groups=32 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_backward_bf16_8x0 132x352 grid=33 kept=1+0
group_norm 2x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 cluster=16 kept=1+0
group_norm 2x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_registers_backward_f16_8x8 132x320 grid=66 kept=1+0
group_norm 2x640x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 cluster=8 kept=1+0
group_norm 2x640x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 256x256 cluster=16 kept=1+0
group_norm 2x1280x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 64x224 parts=1 kept=1+0
group_norm 2x1280x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 128x192 cluster=4 kept=1+0
group_norm 2x1280x8x8 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 64x160 parts=1 kept=1+0
group_norm 2x1280x8x8 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 128x96 cluster=4 kept=1+0
group_norm 2x640x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=66 kept=1+0
group_norm 2x640x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=66 kept=1+0
group_norm 2x320x128x128 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=66 kept=1+0
group_norm 2x320x128x128 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=132 kept=1+0
group_norm 2x320x128x128 groups=32 dtype=f16 act=silu device=cuda | rows_split_forward_f16_8x22 256x256 grid=4 kept=1+0
group_norm 2x320x128x128 groups=32 dtype=f16 act=silu dir=bwd device=cuda | rows_split_backward_f16_8x9 256x256 grid=4 kept=1+11 + gradients
group_norm 1x128x1024x1024 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=132 kept=1+0
group_norm 1x128x1024x1024 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=132 kept=1+0
group_norm 1x256x512x512 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=132 kept=1+0
group_norm 1x256x512x512 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=132 kept=1+0
group_norm 8x128x512x512 groups=32 dtype=bf16 layout=nhwc device=cuda | columns_two_pass_forward_bf16_8x12 1024x256 parts=128 kept=11+0 + statistics + columns_two_pass_forward_bf16_8x12 2736x256 parts=342 kept=4+0
group_norm 8x128x512x512 groups=32 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_backward_bf16_8x0 132x352 grid=132 kept=1+0
group_norm 1x128x1024x1024 groups=32 dtype=f16 act=silu device=cuda | rows_split_forward_f16_8x22 264x256 grid=66 kept=1+10
group_norm 1x128x1024x1024 groups=32 dtype=f16 act=silu dir=bwd device=cuda | rows_two_pass_backward_f16_8x4 10944x128 parts=342 kept=1+8 + gradients + rows_two_pass_backward_f16_8x4 10944x128 parts=342 kept=1+8
batch_norm 32x512x28x28 device=cuda | rows_block_forward_f32_4x7 512x448 parts=1 kept=1+7
batch_norm 32x512x28x28 dir=bwd device=cuda | rows_split_backward_f32_4x9 2048x128 cluster=4 kept=1+4 + gradients
batch_norm 64x1024x14x14 device=cuda | rows_block_forward_f32_4x7 1024x224 parts=1 kept=1+7
batch_norm 64x1024x14x14 dir=bwd device=cuda | rows_block_backward_f32_4x5 1024x256 parts=1 kept=1+8
batch_norm 16x64x112x112 device=cuda | rows_split_forward_f32_4x22 256x256 grid=4 kept=1+27
batch_norm 16x64x112x112 dir=bwd device=cuda | rows_split_backward_f32_4x9 264x256 grid=12 kept=1+8 + gradients
batch_norm 32x10x200x200 device=cuda | rows_split_forward_f32_4x22 260x256 grid=26 kept=1+27
batch_norm 32x10x200x200 dir=bwd device=cuda | rows_split_backward_f32_4x9 264x256 grid=66 kept=1+10 + gradients
batch_norm 128x1024x32x32 device=cuda | rows_split_forward_f32_4x22 4096x256 cluster=4 kept=1+10
batch_norm 128x1024x32x32 dir=bwd device=cuda | rows_split_backward_f32_4x9 8192x256 cluster=8 kept=1+7 + gradients
batch_norm 256x64x112x112 dtype=f16 layout=nhwc device=cuda | columns_grid_pipeline_batch_forward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 256x64x112x112 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_batch_backward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 256x256x56x56 dtype=f16 layout=nhwc device=cuda | columns_grid_pipeline_batch_forward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 256x256x56x56 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_batch_backward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 256x256x56x56 dtype=f16 device=cuda | rows_split_forward_f16_8x22 256x256 grid=8 kept=1+27
batch_norm 256x256x56x56 dtype=f16 dir=bwd device=cuda | rows_split_backward_f16_8x9 252x256 grid=18 kept=1+13 + gradients
batch_norm 256x2048x7x7 dtype=f16 layout=nhwc device=cuda | columns_grid_pipeline_batch_forward_f16_8x0 132x288 grid=132 kept=1+0
batch_norm 256x2048x7x7 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_batch_backward_f16_8x0 132x288 grid=132 kept=1+0
affine 64x256x64x64 per=sample device=cuda | rows_two_pass_forward_f32_4x5 26240x64 parts=410 kept=2+0
affine 64x256x64x64 per=sample dir=bwd device=cuda | rows_two_pass_backward_f32_4x4 10944x128 parts=171 kept=1+8 + gradients
affine 64x256x64x64 dtype=bf16 layout=nhwc per=sample device=cuda | columns_elementwise_forward_bf16_8x4 8192x256 parts=128 kept=1+0
affine 64x256x64x64 dtype=bf16 layout=nhwc per=sample dir=bwd device=cuda | columns_elementwise_backward_bf16_8x4 512x512 parts=8 kept=8+0 + gradients
group_norm 61x192x29x29 groups=32 device=cuda | rows_unaligned_forward_f32_4x9 1952x160 parts=1 kept=1+0
group_norm 61x192x29x29 groups=32 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 1952x128 parts=1 kept=1+4 + gradients
group_norm 61x192x29x29 groups=32 dtype=bf16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_bf16_8x0 122x352 grid=2 kept=1+0
group_norm 61x192x29x29 groups=32 dtype=bf16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_bf16_8x0 124x352 grid=4 kept=1+0
group_norm 7x96x257x263 groups=32 act=silu device=cuda | rows_unaligned_forward_f32_4x9 1344x256 cluster=6 kept=1+25
group_norm 7x96x257x263 groups=32 act=silu dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 253x256 grid=11 kept=1+13 + gradients
group_norm 7x96x257x263 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_two_pass_forward_f16_8x12 525x256 parts=75 kept=4+0 + statistics + columns_two_pass_forward_f16_8x12 1883x256 parts=269 kept=1+0
group_norm 7x96x257x263 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_two_pass_backward_f16_8x8 259x256 parts=37 kept=11+0 + gradients + columns_two_pass_backward_f16_8x8 1414x256 parts=202 kept=2+0
group_norm 31x64x127x131 groups=8 dtype=f16 device=cuda | rows_unaligned_forward_f16_8x9 496x256 cluster=2 kept=1+24
group_norm 31x64x127x131 groups=8 dtype=f16 dir=bwd device=cuda | rows_unaligned_backward_f16_8x6 1984x128 cluster=8 kept=1+11 + gradients
group_norm 31x64x127x131 groups=8 dtype=bf16 layout=nhwc device=cuda | columns_grid_pipeline_forward_bf16_8x0 132x352 grid=12 kept=1+0
group_norm 31x64x127x131 groups=8 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_backward_bf16_8x0 132x352 grid=22 kept=1+0
group_norm 64x32x113x113 groups=32 dtype=f16 layout=nhwc device=cuda | columns_split_forward_f16_8x16 1024x256 cluster=16 kept=1+0
group_norm 64x32x113x113 groups=32 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_split_backward_f16_8x6 512x256 cluster=8 kept=1+19 + gradients
group_norm 64x32x113x113 groups=32 device=cuda | rows_unaligned_forward_f32_4x9 2048x384 parts=1 kept=1+0
group_norm 64x32x113x113 groups=32 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 2048x256 parts=1 kept=1+7 + gradients
group_norm 32x96x101x103 groups=32 dtype=bf16 layout=nhwc device=cuda | columns_split_forward_bf16_8x16 512x512 cluster=16 kept=1+0
group_norm 32x96x101x103 groups=32 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_two_pass_backward_bf16_8x8 256x256 parts=8 kept=8+0 + gradients + columns_two_pass_backward_bf16_8x8 1984x256 parts=62 kept=1+0
group_norm 32x96x101x103 groups=32 device=cuda | rows_unaligned_forward_f32_4x9 1024x224 parts=1 kept=1+26
group_norm 32x96x101x103 groups=32 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 4096x128 cluster=4 kept=1+10 + gradients
group_norm 16x320x61x67 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 16x320x61x67 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=33 kept=1+0
group_norm 16x320x61x67 groups=32 dtype=f16 device=cuda | rows_unaligned_forward_f16_8x9 512x448 parts=1 kept=1+3
group_norm 16x320x61x67 groups=32 dtype=f16 dir=bwd device=cuda | rows_unaligned_backward_f16_8x6 2048x128 cluster=4 kept=1+4 + gradients
group_norm 2x2560x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 cluster=4 kept=1+0
group_norm 2x2560x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 256x256 cluster=8 kept=1+0
group_norm 2x2560x32x32 groups=32 dtype=f16 act=silu device=cuda | rows_split_forward_f16_8x22 256x256 grid=4 kept=1+0
group_norm 2x2560x32x32 groups=32 dtype=f16 act=silu dir=bwd device=cuda | rows_split_backward_f16_8x9 256x256 grid=4 kept=1+1 + gradients
group_norm 8x330x64x64 groups=33 dtype=f16 layout=nhwc act=silu device=cuda | columns_split_forward_f16_8x16 128x192 grid=16 kept=1+48
group_norm 8x330x64x64 groups=33 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_two_pass_backward_f16_8x8 256x192 parts=32 kept=4+0 + gradients + columns_two_pass_backward_f16_8x8 1024x192 parts=128 kept=1+0
group_norm 8x85x96x96 groups=17 dtype=bf16 layout=nhwc device=cuda | columns_split_forward_bf16_8x16 128x512 grid=16 kept=1+0
group_norm 8x85x96x96 groups=17 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_split_backward_bf16_8x6 128x256 cluster=16 kept=1+18 + gradients
batch_norm 64x257x31x31 dtype=f16 layout=nhwc device=cuda | columns_two_pass_forward_f16_8x12 131x288 parts=131 kept=5+0 + statistics + columns_two_pass_forward_f16_8x12 641x288 parts=641 kept=1+0
batch_norm 64x257x31x31 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_two_pass_backward_f16_8x8 131x288 parts=131 kept=8+0 + gradients + columns_two_pass_backward_f16_8x8 961x288 parts=961 kept=1+0
batch_norm 61x1031x13x13 dtype=bf16 layout=nhwc device=cuda | columns_general_forward_bf16_8x4 357x256 parts=21 kept=1+0 + statistics + columns_general_forward_bf16_8x4 357x256 parts=21 kept=1+0
batch_norm 61x1031x13x13 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_general_backward_bf16_8x4 357x256 parts=21 kept=1+0 + gradients + columns_general_backward_bf16_8x4 357x256 parts=21 kept=1+0
batch_norm 31x257x31x31 dtype=f16 layout=nhwc device=cuda | columns_unaligned_forward_f16_8x12 129x288 parts=129 kept=3+0 + statistics + columns_unaligned_forward_f16_8x12 311x288 parts=311 kept=1+0
batch_norm 31x257x31x31 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_unaligned_backward_f16_8x8 129x288 parts=129 kept=4+0 + gradients + columns_unaligned_backward_f16_8x8 466x288 parts=466 kept=1+0
group_norm 64x100x31x31 groups=10 dtype=bf16 layout=nhwc act=silu device=cuda | columns_unaligned_forward_bf16_8x12 320x256 parts=5 kept=1+0 + statistics + columns_unaligned_forward_bf16_8x12 320x256 parts=5 kept=1+0
group_norm 64x100x31x31 groups=10 dtype=bf16 layout=nhwc act=silu dir=bwd device=cuda | columns_unaligned_backward_bf16_8x8 256x256 parts=4 kept=2+0 + gradients + columns_unaligned_backward_bf16_8x8 448x256 parts=7 kept=1+0
group_norm 32x30x61x67 groups=10 layout=nhwc act=silu device=cuda | columns_unaligned_forward_f32_4x12 352x256 parts=11 kept=1+0 + statistics + columns_unaligned_forward_f32_4x12 352x256 parts=11 kept=1+0
group_norm 32x30x61x67 groups=10 layout=nhwc act=silu dir=bwd device=cuda | columns_unaligned_backward_f32_4x8 352x256 parts=11 kept=2+0 + gradients + columns_unaligned_backward_f32_4x8 512x256 parts=16 kept=1+0
group_norm 1x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 128x160 cluster=16 kept=1+0
group_norm 1x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_registers_backward_f16_8x8 128x320 grid=128 kept=1+0
group_norm 1x1280x37x41 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x256 cluster=8 kept=1+0
group_norm 1x1280x37x41 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_registers_backward_f16_8x8 127x320 grid=127 kept=1+0
group_norm 1x64x2039x1021 groups=32 dtype=bf16 layout=nhwc act=silu device=cuda | columns_two_pass_forward_bf16_8x12 525x256 parts=525 kept=11+0 + statistics + columns_two_pass_forward_bf16_8x12 2711x256 parts=2711 kept=2+0
group_norm 1x64x2039x1021 groups=32 dtype=bf16 layout=nhwc act=silu dir=bwd device=cuda | columns_two_pass_backward_bf16_8x8 509x256 parts=509 kept=16+0 + gradients + columns_two_pass_backward_bf16_8x8 2034x256 parts=2034 kept=4+0
group_norm 1x512x256x256 groups=32 dtype=f16 act=silu device=cuda | rows_split_forward_f16_8x22 256x256 grid=16 kept=1+10
group_norm 1x512x256x256 groups=32 dtype=f16 act=silu dir=bwd device=cuda | rows_split_backward_f16_8x9 264x256 grid=24 kept=1+13 + gradients
group_norm 1x64x1024x1024 groups=1 dtype=f16 device=cuda | rows_two_pass_forward_f16_8x5 937x128 parts=937 kept=14+0 + statistics + rows_two_pass_forward_f16_8x5 13108x64 parts=13108 kept=2+0
group_norm 1x64x1024x1024 groups=1 dtype=f16 dir=bwd device=cuda | rows_two_pass_backward_f16_8x4 5462x128 parts=5462 kept=1+8 + gradients + rows_two_pass_backward_f16_8x4 5462x128 parts=5462 kept=1+8
group_norm 1x64x1024x1024 groups=1 dtype=f16 layout=nhwc device=cuda | columns_two_pass_forward_f16_8x12 521x256 parts=521 kept=6+0 + statistics + columns_two_pass_forward_f16_8x12 2731x256 parts=2731 kept=1+0
group_norm 1x64x1024x1024 groups=1 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_two_pass_backward_f16_8x8 263x256 parts=263 kept=16+0 + gradients + columns_two_pass_backward_f16_8x8 1366x256 parts=1366 kept=3+0
group_norm 4x256x256x256 groups=1 device=cuda | rows_two_pass_forward_f32_4x5 1052x128 parts=263 kept=25+0 + statistics + rows_two_pass_forward_f32_4x5 26216x64 parts=6554 kept=2+0
group_norm 4x256x256x256 groups=1 dir=bwd device=cuda | rows_two_pass_backward_f32_4x4 10924x128 parts=2731 kept=1+8 + gradients + rows_two_pass_backward_f32_4x4 10924x128 parts=2731 kept=1+8
group_norm 4096x256x4x4 groups=256 device=cuda | rows_lanes_forward_f32_4x4 8192x128 parts=1 kept=1+0
group_norm 4096x256x4x4 groups=256 dir=bwd device=cuda | rows_lines_backward_f32_1x8 656x128 parts=164 kept=1+0 + gradients
group_norm 4096x256x4x4 groups=256 dtype=f16 layout=nhwc device=cuda | columns_lanes_rows_forward_f16_8x4 264x256 parts=264 kept=1+0
group_norm 4096x256x4x4 groups=256 dtype=f16 layout=nhwc dir=bwd device=cuda | columns_lanes_rows_backward_f16_8x2 264x256 parts=264 kept=1+0 + gradients
group_norm 65536x512 groups=32 dtype=bf16 device=cuda | columns_lanes_forward_bf16_8x1 264x256 parts=264 kept=1+0
group_norm 65536x512 groups=32 dtype=bf16 dir=bwd device=cuda | columns_lanes_backward_bf16_8x1 264x256 parts=264 kept=1+0 + gradients
group_norm 8x512x31999 groups=512 act=gelu device=cuda | rows_unaligned_forward_f32_4x9 4096x224 parts=1 kept=1+27
group_norm 8x512x31999 groups=512 act=gelu dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 16384x128 cluster=4 kept=1+10 + gradients
group_norm 2x48x31x61x67 groups=8 dtype=f16 layout=nhwc act=relu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=66 kept=1+0
group_norm 2x48x31x61x67 groups=8 dtype=f16 layout=nhwc act=relu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=132 kept=1+0
instance_norm 2x32x128x128x128 act=leaky_relu device=cuda | rows_split_forward_f32_4x22 264x256 grid=44 kept=1+25
instance_norm 2x32x128x128x128 act=leaky_relu dir=bwd device=cuda | rows_two_pass_backward_f32_4x4 21888x128 parts=342 kept=1+8 + gradients + rows_two_pass_backward_f32_4x4 21888x128 parts=342 kept=1+8
instance_norm 16x64x255x257 dtype=f16 layout=nhwc act=relu device=cuda | columns_two_pass_forward_f16_8x12 528x256 parts=33 kept=6+0 + statistics + columns_two_pass_forward_f16_8x12 2736x256 parts=171 kept=1+0
instance_norm 16x64x255x257 dtype=f16 layout=nhwc act=relu dir=bwd device=cuda | columns_two_pass_backward_f16_8x8 256x256 parts=16 kept=16+0 + gradients + columns_two_pass_backward_f16_8x8 1376x256 parts=86 kept=3+0
batch_norm 29x257x31x31 device=cuda | rows_unaligned_forward_f32_4x9 514x256 cluster=2 kept=1+5
batch_norm 29x257x31x31 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 1542x128 cluster=6 kept=1+4 + gradients
batch_norm 17x48x209x213 act=relu device=cuda | rows_unaligned_forward_f32_4x9 264x256 grid=22 kept=1+25
batch_norm 17x48x209x213 act=relu dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 264x256 grid=44 kept=1+11 + gradients
batch_norm 17x48x209x213 dtype=f16 layout=nhwc act=relu device=cuda | columns_grid_pipeline_batch_forward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 17x48x209x213 dtype=f16 layout=nhwc act=relu dir=bwd device=cuda | columns_grid_pipeline_batch_backward_f16_8x0 132x352 grid=132 kept=1+0
batch_norm 1x96x523x527 device=cuda | rows_unaligned_forward_f32_4x9 768x256 cluster=8 kept=1+25
batch_norm 1x96x523x527 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 256x256 grid=16 kept=1+11 + gradients
batch_norm 128x2048x7x7 device=cuda | rows_unaligned_forward_f32_4x9 2048x192 parts=1 kept=1+0
batch_norm 128x2048x7x7 dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 2048x128 parts=1 kept=1+7
batch_norm 256x512x14x14 dtype=bf16 layout=nhwc device=cuda | columns_grid_pipeline_batch_forward_bf16_8x0 132x352 grid=132 kept=1+0
batch_norm 256x512x14x14 dtype=bf16 layout=nhwc dir=bwd device=cuda | columns_grid_pipeline_batch_backward_bf16_8x0 132x352 grid=132 kept=1+0
batch_norm 8192x1024 dtype=f16 device=cuda | columns_split_forward_f16_8x16 128x256 cluster=16 kept=1+16
batch_norm 8192x1024 dtype=f16 dir=bwd device=cuda | columns_grid_pipeline_batch_backward_f16_8x0 132x288 grid=132 kept=1+0
batch_norm 64x256x56x56 dtype=f16 layout=nhwc act=relu mode=eval device=cuda | columns_elementwise_forward_f16_8x4 6272x256 parts=6272 kept=1+0
batch_norm 64x256x56x56 dtype=f16 layout=nhwc act=relu mode=eval dir=bwd device=cuda | columns_elementwise_backward_f16_8x4 392x512 parts=392 kept=8+0 + gradients
affine 31x193x61x67 per=sample device=cuda | rows_unaligned_forward_f32_4x9 5332x128 parts=172 kept=1+0
affine 31x193x61x67 per=sample dir=bwd device=cuda | rows_unaligned_backward_f32_4x6 3441x128 parts=111 kept=1+8 + gradients
affine 31x193x61x67 dtype=f16 layout=nhwc per=sample device=cuda | columns_unaligned_forward_f16_8x12 1333x224 parts=43 kept=1+0
affine 31x193x61x67 dtype=f16 layout=nhwc per=sample dir=bwd device=cuda | columns_unaligned_backward_f16_8x8 1984x224 parts=64 kept=1+0 + gradients
affine 13x640x127x129 dtype=bf16 layout=nhwc act=silu device=cuda | columns_elementwise_forward_bf16_8x4 26624x256 parts=13312 kept=1+0
affine 13x640x127x129 dtype=bf16 layout=nhwc act=silu dir=bwd device=cuda | columns_elementwise_backward_bf16_8x4 1664x512 parts=832 kept=8+0 + gradients
group_norm 8x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 8x320x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=33 kept=1+0
group_norm 8x640x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x352 grid=33 kept=1+0
group_norm 8x640x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 132x352 grid=66 kept=1+0
group_norm 8x960x64x64 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 132x288 grid=44 kept=1+0
group_norm 8x960x64x64 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x288 grid=128 kept=1+0
group_norm 8x320x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 cluster=8 kept=1+0
group_norm 8x320x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_registers_backward_f16_8x8 128x320 grid=16 kept=1+0
group_norm 8x640x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 8x640x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 8x960x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 128x288 grid=16 kept=1+0
group_norm 8x960x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x288 grid=32 kept=1+0
group_norm 8x1280x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_grid_pipeline_forward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 8x1280x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x352 grid=32 kept=1+0
group_norm 8x1920x32x32 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_split_forward_f16_8x16 128x256 cluster=8 kept=1+48
group_norm 8x1920x32x32 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 129x288 grid=43 kept=1+0
group_norm 8x640x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 128x224 parts=1 kept=1+0
group_norm 8x640x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 256x256 cluster=16 kept=1+0
group_norm 8x1280x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 parts=1 kept=1+0
group_norm 8x1280x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_registers_backward_f16_8x8 128x320 grid=16 kept=1+0
group_norm 8x1920x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x256 cluster=8 kept=1+0
group_norm 8x1920x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x288 grid=16 kept=1+0
group_norm 8x2560x16x16 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_split_forward_f16_8x16 128x480 parts=1 kept=1+0
group_norm 8x2560x16x16 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_grid_pipeline_backward_f16_8x0 128x352 grid=16 kept=1+0
group_norm 8x1280x8x8 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 128x224 parts=1 kept=1+0
group_norm 8x1280x8x8 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 128x256 cluster=8 kept=1+0
group_norm 8x2560x8x8 groups=32 dtype=f16 layout=nhwc act=silu device=cuda | columns_cluster_forward_f16_8x8 256x224 parts=1 kept=1+0
group_norm 8x2560x8x8 groups=32 dtype=f16 layout=nhwc act=silu dir=bwd device=cuda | columns_cluster_backward_f16_8x4 256x256 cluster=8 kept=1+0
