cat delivery.txt >>stock.txt
wc -l <stock.txt >count.txt
